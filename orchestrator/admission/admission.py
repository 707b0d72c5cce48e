"""Admission: who may run, who may wait, and who is told at once to come back later.

A generation needs a slot, which is a session of the services, and room for its tokens: those that
it may still read and write. First come, first served: a small request does not overtake a large
one, which would otherwise wait for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self

from flyspec.config import WAITING_SHARE, OrchestratorSettings
from flyspec.errors import DeadlineExceededError, ResourceExhaustedError, UnavailableError
from flyspec.security import ApiKey
from orchestrator.admission.clients import ClientLimits
from orchestrator.admission.waits import HoldTimes

REFUSALS = ("queue_full", "wait_too_long", "deadline", "client_limit", "draining", "service_full")
"""Why requests are not let in: their numbers are metrics."""
POLL_S = 0.25
"""So often it is looked whether new room, of a replica that came, lets a waiting one in."""
ASKING_S = 0.02
"""A request still asking the service after this long is queued there: no slot is free, s."""


class Admission:
    """Counts running and waiting generations and says who is next.

    `capacity` says how many may run now; it may change at any time. `max_waiting` None is a share
    of it. 0 is no bound of `max_queue_wait_s` and `max_outstanding_tokens`. A request of more than
    `max_outstanding_tokens` counts as so many, and so runs alone.

    `others` says how many generations of other orchestrators the services hold, None if they hold
    and await none. With others, one at a time asks the service for its slot, until it is `granted`:
    there it is in turn with those of the others.
    """

    def __init__(
        self,
        capacity: Callable[[], int],
        clients: ClientLimits | None = None,
        *,
        max_waiting: int | None = None,
        max_queue_wait_s: float = 0.0,
        max_outstanding_tokens: int = 0,
        holds: HoldTimes | None = None,
        others: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._capacity, self._others = capacity, others
        self._clients = clients or ClientLimits()
        self._max_waiting = max_waiting
        self._max_queue_wait_s = max_queue_wait_s
        self._max_tokens = max_outstanding_tokens
        self._holds = holds or HoldTimes()
        self._queue: dict[Visit, asyncio.Future[None]] = {}
        self._queued_tokens = 0
        self._asking: set[Visit] = set()  # these run, but are not granted a slot yet
        self._arriving = 0  # visits that neither wait nor run yet
        self._poll: asyncio.TimerHandle | None = None
        self.active = 0
        self.outstanding_tokens = 0
        self.refusals = dict.fromkeys(REFUSALS, 0)
        """Requests that were not let in, by reason."""
        self.draining = False

    @classmethod
    def of(
        cls,
        settings: OrchestratorSettings,
        capacity: Callable[[], int],
        others: Callable[[], int | None] = lambda: None,
    ) -> Admission:
        """As the settings say; `capacity` is how many generations the services hold now.

        Where the settings say how many may run, `others` do not matter.
        """
        clients = ClientLimits(
            settings.max_concurrent_per_client, settings.max_requests_per_minute_per_client
        )
        return cls(
            lambda: settings.max_concurrent or capacity(),
            clients,
            max_waiting=settings.max_waiting,
            max_queue_wait_s=settings.max_queue_wait_s,
            max_outstanding_tokens=settings.max_outstanding_tokens,
            others=lambda: None if settings.max_concurrent else others(),
        )

    @property
    def waiting(self) -> int:
        """Generations that wait for a slot."""
        return len(self._queue)

    @property
    def slots(self) -> int:
        """Generations that may run at once, as things are now."""
        return self._share

    @property
    def refused_total(self) -> int:
        """Requests refused for want of room, or because their client has had its share."""
        return sum(self.refusals.values()) - self.refusals["draining"]

    def visit(self, client: str, deadline: float | None = None, key: ApiKey | None = None) -> Visit:
        """A request of that client that arrives now, before anything is done for it.

        `deadline` is in the event loop's time, `key` the client's if it has one. Raises
        `UnavailableError` while nothing new is let in, `ResourceExhaustedError` when there is no
        room for it or the client has had its share.
        """
        self._check_draining()
        self._check_room(self._place(self._arriving), 0, deadline)
        try:
            self._clients.enter(client, self._retry_after(0.0), key)
        except ResourceExhaustedError:
            self.refusals["client_limit"] += 1
            raise
        self._arriving += 1
        return Visit(self, client, deadline)

    def drain(self) -> None:
        """Let nothing new in; those that wait are refused at once."""
        self.draining = True
        for future in self._queue.values():
            if not future.done():
                self.refusals["draining"] += 1
                future.set_exception(_draining())
        self._queue.clear()
        self._queued_tokens = 0

    def resume(self) -> None:
        """Let generations in again."""
        self.draining = False

    # --- what a visit calls -------------------------------------------------------------------

    async def _enter(self, visit: Visit, tokens: int) -> None:
        """Wait until the visit may run; it then holds a slot."""
        self._arrived(visit)
        self._check_draining()
        visit.tokens = min(tokens, self._max_tokens) if self._max_tokens else tokens
        if not self._queue and self._fits(visit):
            self._start(visit)
            return
        self._check_room(self._place(), visit.tokens, visit.deadline)
        future = asyncio.get_running_loop().create_future()
        self._queue[visit] = future
        self._queued_tokens += visit.tokens
        self._watch()
        try:
            await future
        finally:
            self._dequeue(visit)
            self._admit()  # others may have waited behind this one alone

    def _granted(self, visit: Visit) -> None:
        """The visit has its slot of the service."""
        self._asking.discard(visit)
        if self._queue:
            self._admit()

    def _leave(self, visit: Visit) -> None:
        """Give back the slot."""
        if visit.running:
            visit.running = False
            self._asking.discard(visit)
            self._holds.end(visit.started)
            self.active -= 1
            self.outstanding_tokens -= visit.tokens
            self._admit()

    def _end(self, visit: Visit) -> None:
        """The visit is over."""
        self._arrived(visit)
        self._clients.leave(visit.client)

    def _lighten(self, visit: Visit, tokens: int) -> None:
        """So many tokens are left of a visit that runs."""
        done = visit.tokens - tokens
        if done > 0:
            visit.tokens = tokens
            self.outstanding_tokens -= done
            if self._max_tokens and self._queue:
                self._admit()

    # --- how ------------------------------------------------------------------------------------

    @property
    def _share(self) -> int:
        """Generations that may run here, besides those that other orchestrators run."""
        return max(0, self._capacity() - (self._others() or 0))

    def _place(self, arriving: int = 0) -> int:
        """Who comes now, behind so many that arrive, would be in that place of the queue."""
        place = len(self._queue) + arriving + 1
        if self._others() is None:
            return place if self._queue else place - max(0, self._capacity() - self.active)
        # Counts of the others are stale; a request that is asking the service right now is not.
        free = self._share - self.active
        if not self._asking:
            return place - max(free, 1)
        waits = any(self._holds.held_s(visit.started) > ASKING_S for visit in self._asking)
        return place + 1 if waits else place - free

    def _fits(self, visit: Visit) -> bool:
        """Whether there is a slot and room for the visit's tokens."""
        if self._others() is not None:
            if self._asking:
                return False
        elif self.active >= self._capacity():
            return False
        room = self._max_tokens - self.outstanding_tokens
        return not self._max_tokens or visit.tokens <= room

    def _start(self, visit: Visit) -> None:
        visit.running, visit.started = True, self._holds.begin()
        self._asking.add(visit)
        self.active += 1
        self.outstanding_tokens += visit.tokens

    def _admit(self) -> None:
        """Let in whom there is room for, in order."""
        while self._queue:
            visit, future = next(iter(self._queue.items()))
            if future.done():  # its task was cancelled and does not know it yet
                self._dequeue(visit)
            elif self._fits(visit):
                self._dequeue(visit)
                self._start(visit)
                future.set_result(None)
            else:
                return

    def _dequeue(self, visit: Visit) -> None:
        if self._queue.pop(visit, None) is not None:
            self._queued_tokens -= visit.tokens

    def _arrived(self, visit: Visit) -> None:
        if visit.arriving:
            visit.arriving = False
            self._arriving -= 1

    def _watch(self) -> None:
        """Look for new room from time to time as long as somebody waits."""
        if self._poll is None:
            self._poll = asyncio.get_running_loop().call_later(POLL_S, self._look)

    def _look(self) -> None:
        self._poll = None
        self._admit()
        if self._queue:
            self._watch()

    def _check_draining(self) -> None:
        if self.draining:
            self.refusals["draining"] += 1
            raise _draining()

    def _check_room(self, place: int, tokens: int, deadline: float | None) -> None:
        """Refuse a request that would be in that place of the queue, if it would wait too long."""
        capacity = self._share
        limit = self._max_waiting
        if limit is None:
            limit = max(1, int(WAITING_SHARE * capacity))
        wait = self._wait_s(place, tokens, capacity)
        if place > limit:
            reason = "queue_full"
            why = f"all slots are taken, with {self.active} running and {place - 1} waiting"
        elif self._max_queue_wait_s and wait > self._max_queue_wait_s:
            reason = "wait_too_long"
            why = f"there would be room in about {wait:.3g} s, which is too long to wait"
        elif deadline is not None and (left := deadline - _now()) < wait:
            reason = "deadline"
            why = (
                f"there would be room in about {wait:.3g} s, but the request's deadline is in "
                f"{max(0.0, left):.3g} s; allow more time"
            )
        else:
            return
        self.refusals[reason] += 1
        raise ResourceExhaustedError(why, self._retry_after(wait))

    def _wait_s(self, place: int, tokens: int, capacity: int) -> float:
        """About how long a request in that place of the queue waits, seconds."""
        wait = self._holds.wait_s(place, capacity)
        if self._max_tokens and place > 0:
            # Room for as many tokens as the limit comes free in the time that a slot is held.
            lacking = self.outstanding_tokens + self._queued_tokens + tokens - self._max_tokens
            wait = max(wait, lacking / self._max_tokens * self._holds.estimate_s)
        return wait

    def _retry_after(self, wait_s: float) -> float:
        """When somebody may come back who would wait so long, seconds."""
        return self._holds.retry_after_s(wait_s, self._share)


class Visit:
    """A request from its arrival to its end: `async with` gives back what it holds.

    Ends at its deadline with `DeadlineExceededError`, but not while it is `pause`d: then others
    than the generation do something. `tokens` it may still read and write.
    """

    def __init__(self, admission: Admission, client: str, deadline: float | None) -> None:
        self._admission = admission
        self._timeout = asyncio.timeout_at(deadline)
        self._total = self._used = 0
        self.client, self.deadline = client, deadline
        self.tokens = 0
        self.started = 0.0
        self.arriving, self.running = True, False

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._admission._end(self)
        if isinstance(error, ResourceExhaustedError) and error.retry_after_s is None:
            # A service was full: somebody else uses it, too, and waits there since earlier.
            self._admission.refusals["service_full"] += 1
            error.retry_after_s = self._admission._retry_after(0.0)
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise DeadlineExceededError(
                f"the request's deadline passed with {self._used} of up to {self._total} tokens "
                "read and written; allow more time or lower max_tokens"
                if self.started
                else "the request's deadline passed before it had a slot; allow more time"
            ) from None

    @contextlib.asynccontextmanager
    async def slot(self, tokens: int) -> AsyncIterator[None]:
        """Wait for a slot and hold it; at most `tokens` will be read and written.

        Raises `ResourceExhaustedError` when the wait would be too long, `UnavailableError` when
        nothing new is let in any more.
        """
        self._total = tokens
        try:
            await self._admission._enter(self, tokens)
            yield
        finally:
            self._admission._leave(self)

    def granted(self) -> None:
        """The service has a slot for it: the next may ask."""
        self._admission._granted(self)

    def pause(self) -> None:
        """Let the deadline pass until `resume`, which then ends the visit."""
        if self.deadline is not None:
            self._timeout.reschedule(None)

    def resume(self) -> None:
        """Mind the deadline again."""
        if self.deadline is not None:
            self._timeout.reschedule(self.deadline)

    def used(self, tokens: int) -> None:
        """So many tokens of the request were read and written so far."""
        self._used = tokens
        self._admission._lighten(self, self._total - tokens)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _draining() -> UnavailableError:
    return UnavailableError("no new requests are taken here, since the server drains; try another")
