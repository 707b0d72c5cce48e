"""Slots and the queue for them, in order of request age across orchestrators."""

from __future__ import annotations

import asyncio
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from flyspec.config import WAITING_SHARE
from flyspec.errors import ResourceExhaustedError


@dataclass(slots=True, eq=False)
class _Waiting:
    """A session without a slot; its request arrived at `since` on this process's clock."""

    since: float
    orchestrator_id: str
    slot: asyncio.Future[None]


class SlotQueue:
    """Counts sessions per orchestrator and hands out slots. For use on the event loop only.

    The request that has waited longest is next. Orchestrators report how long a request has waited
    rather than since when, because clocks differ between machines. At most `max_waiting` requests
    wait (None: a share of the slots); the youngest make room for older ones.
    """

    def __init__(
        self,
        num_slots: int,
        max_waiting: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_slots, self._clock = num_slots, clock
        if max_waiting is None:
            max_waiting = max(1, int(WAITING_SHARE * num_slots))
        self._max_waiting = max_waiting
        self._open: Counter[str] = Counter()
        self._queue: list[_Waiting] = []

    @property
    def active(self) -> int:
        return self._open.total()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def others(self, orchestrator_id: str) -> int:
        return self.active - self._open[orchestrator_id]

    def others_waiting(self, orchestrator_id: str) -> int:
        return sum(waiting.orchestrator_id != orchestrator_id for waiting in self._queue)

    def take(self, orchestrator_id: str = "") -> None:
        """Take a slot, to be given back. Raises `ResourceExhaustedError` if none is free."""
        if self._queue or self.active >= self._num_slots:
            raise self._full()
        self._open[orchestrator_id] += 1

    async def wait(self, waited_s: float, orchestrator_id: str = "") -> None:
        """Wait for a slot, to be given back. The request has already waited `waited_s` seconds.

        Raises `ResourceExhaustedError` if too many older requests are waiting.
        """
        if not self._queue and self.active < self._num_slots:
            self.take(orchestrator_id)
            return
        slot = asyncio.get_running_loop().create_future()
        waiting = _Waiting(self._clock() - waited_s, orchestrator_id, slot)
        insort(self._queue, waiting, key=lambda other: other.since)
        if len(self._queue) > self._max_waiting:
            self._queue.pop().slot.set_exception(self._full())
        try:
            await slot
        except asyncio.CancelledError:
            if waiting in self._queue:
                self._queue.remove(waiting)
            elif slot.done() and not slot.cancelled() and slot.exception() is None:
                self.give_back(orchestrator_id)  # granted too late
            raise

    def give_back(self, orchestrator_id: str = "") -> None:
        """Pass the slot of a session that ended to the next one waiting."""
        self._open[orchestrator_id] -= 1
        if not self._open[orchestrator_id]:
            del self._open[orchestrator_id]
        while self._queue and self.active < self._num_slots:
            waiting = self._queue.pop(0)
            if not waiting.slot.done():  # otherwise its task is being cancelled
                self._open[waiting.orchestrator_id] += 1
                waiting.slot.set_result(None)

    def _full(self) -> ResourceExhaustedError:
        waiting = f" and {self.waiting} are waiting" if self._queue else ""
        return ResourceExhaustedError(
            f"all {self._num_slots} sessions are in use{waiting}; "
            "retry later or raise --max-sessions"
        )
