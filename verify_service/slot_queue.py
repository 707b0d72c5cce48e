"""Admission of sessions by request age, whichever orchestrator they are of: slots and blocks."""

from __future__ import annotations

import asyncio
import time
from bisect import insort
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from flyspec.config import WAITING_SHARE
from flyspec.errors import ResourceExhaustedError


@dataclass(slots=True, eq=False)
class SessionPlace:
    """An open session's place. Until it `has_run`, `num_blocks` of the cache are left to it."""

    orchestrator_id: str
    num_blocks: int
    has_run: bool = False


@dataclass(slots=True, eq=False)
class _Waiting:
    """A session that is not admitted; its request arrived at `since` on this process's clock."""

    since: float
    orchestrator_id: str
    num_blocks: int
    place: asyncio.Future[SessionPlace]


class SlotQueue:
    """Admits sessions while slots and blocks last. For use on the event loop only.

    A session fits if its `num_blocks` are free beside those of admitted sessions that have not run
    yet; one is always admitted. `free_blocks` tells how many there are (0 in a cache without
    blocks, where sessions need none).

    The request that has waited longest is next. Orchestrators report how long a request has waited
    rather than since when, because clocks differ between machines. At most `max_waiting` requests
    wait (None: a share of the slots); the youngest make room for older ones.
    """

    def __init__(
        self,
        num_slots: int,
        max_waiting: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        free_blocks: Callable[[], int] = lambda: 0,
    ) -> None:
        self._num_slots, self._clock, self._free_blocks = num_slots, clock, free_blocks
        if max_waiting is None:
            max_waiting = max(1, int(WAITING_SHARE * num_slots))
        self._max_waiting = max_waiting
        self._admitted: dict[SessionPlace, None] = {}
        self._queue: list[_Waiting] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def active(self) -> int:
        return len(self._admitted)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def others(self, orchestrator_id: str) -> int:
        return sum(place.orchestrator_id != orchestrator_id for place in self._admitted)

    def others_waiting(self, orchestrator_id: str) -> int:
        return sum(waiting.orchestrator_id != orchestrator_id for waiting in self._queue)

    def take(self, orchestrator_id: str = "", num_blocks: int = 0) -> SessionPlace:
        """Admit a session, to be given back. Raises `ResourceExhaustedError` if it does not fit."""
        if self._queue or not self._fits(num_blocks):
            raise self._full()
        return self._admit(orchestrator_id, num_blocks)

    async def wait(
        self, waited_s: float, orchestrator_id: str = "", num_blocks: int = 0
    ) -> SessionPlace:
        """Wait until a session fits, to be given back. It has already waited `waited_s` seconds.

        Raises `ResourceExhaustedError` if too many older requests are waiting.
        """
        self._loop = asyncio.get_running_loop()
        if not self._queue and self._fits(num_blocks):
            return self._admit(orchestrator_id, num_blocks)
        place: asyncio.Future[SessionPlace] = self._loop.create_future()
        waiting = _Waiting(self._clock() - waited_s, orchestrator_id, num_blocks, place)
        insort(self._queue, waiting, key=lambda other: other.since)
        if len(self._queue) > self._max_waiting:
            self._queue.pop().place.set_exception(self._full())
        try:
            return await place
        except asyncio.CancelledError:
            if waiting in self._queue:
                self._queue.remove(waiting)
            elif place.done() and not place.cancelled() and place.exception() is None:
                self.give_back(place.result())  # granted too late
            raise

    def give_back(self, place: SessionPlace) -> None:
        """End a session's admission, and admit those waiting that fit now."""
        del self._admitted[place]
        self._admit_waiting()

    def look_again(self) -> None:
        """Admit those waiting that fit by now. May be called by any thread."""
        if self._loop is not None:
            # The event loop may already be closed during shutdown.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._admit_waiting)

    def _fits(self, num_blocks: int) -> bool:
        if self.active >= self._num_slots:
            return False
        kept = sum(place.num_blocks for place in self._admitted if not place.has_run)
        return not self._admitted or kept + num_blocks <= self._free_blocks()

    def _admit(self, orchestrator_id: str, num_blocks: int) -> SessionPlace:
        place = SessionPlace(orchestrator_id, num_blocks)
        self._admitted[place] = None
        return place

    def _admit_waiting(self) -> None:
        while self._queue and self._fits(self._queue[0].num_blocks):
            waiting = self._queue.pop(0)
            if not waiting.place.done():  # otherwise its task is being cancelled
                place = self._admit(waiting.orchestrator_id, waiting.num_blocks)
                waiting.place.set_result(place)

    def _full(self) -> ResourceExhaustedError:
        waiting = f" and {self.waiting} are waiting" if self._queue else ""
        if self.active < self._num_slots:
            return ResourceExhaustedError(
                f"the KV cache has no room for another session beside {self.active}{waiting}; "
                "retry later or raise --kv-cache-memory-bytes"
            )
        return ResourceExhaustedError(
            f"all {self._num_slots} sessions are in use{waiting}; "
            "retry later or raise --max-sessions"
        )
