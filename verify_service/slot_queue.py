"""Who has a slot, and who waits for one: in order of the requests' ages, whoever opens them."""

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
    """A session without a slot; its request arrived at `since`, by this process's clock."""

    since: float
    orchestrator_id: str
    slot: asyncio.Future[None]


class SlotQueue:
    """Counts the sessions of each orchestrator, and hands out slots. On the event loop alone.

    The request that has waited longest is next. An orchestrator says how long one has waited rather
    than since when: clocks of machines differ. `max_waiting` None is a share of the slots; the
    youngest make room for older ones.
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
        """Sessions that have a slot."""
        return self._open.total()

    @property
    def waiting(self) -> int:
        """Sessions that wait for one."""
        return len(self._queue)

    def others(self, orchestrator_id: str) -> int:
        """Sessions with a slot that are not of that orchestrator."""
        return self.active - self._open[orchestrator_id]

    def others_waiting(self, orchestrator_id: str) -> int:
        """Sessions that wait for a slot and are not of that orchestrator."""
        return sum(waiting.orchestrator_id != orchestrator_id for waiting in self._queue)

    def take(self, orchestrator_id: str = "") -> None:
        """A slot, now; to be given back. Raises `ResourceExhaustedError` when none is free."""
        if self._queue or self.active >= self._num_slots:
            raise self._full()
        self._open[orchestrator_id] += 1

    async def wait(self, waited_s: float, orchestrator_id: str = "") -> None:
        """A slot, in its turn; to be given back. The request has waited so long already.

        Raises `ResourceExhaustedError` when too many older ones wait.
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
                self.give_back(orchestrator_id)  # it came too late
            raise

    def give_back(self, orchestrator_id: str = "") -> None:
        """A session has ended: its slot is the next one's."""
        self._open[orchestrator_id] -= 1
        if not self._open[orchestrator_id]:
            del self._open[orchestrator_id]
        while self._queue and self.active < self._num_slots:
            waiting = self._queue.pop(0)
            if not waiting.slot.done():  # else its task was cancelled and does not know it yet
                self._open[waiting.orchestrator_id] += 1
                waiting.slot.set_result(None)

    def _full(self) -> ResourceExhaustedError:
        waiting = f", and {self.waiting} wait for one" if self._queue else ""
        return ResourceExhaustedError(
            f"all {self._num_slots} sessions are in use{waiting}; "
            "retry later or raise --max-sessions"
        )
