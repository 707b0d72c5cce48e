"""Admission control: which requests run, which wait, and which are refused at once.

A generation needs a slot (a session of the services) and token budget for the prompt and output
tokens it may still process. First come, first served: small requests do not overtake large ones,
which could otherwise wait forever.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self

from flyspec.config import WAITING_SHARE, OrchestratorSettings
from flyspec.errors import DeadlineExceededError, ResourceExhaustedError, UnavailableError
from flyspec.security import ApiKey
from orchestrator.admission.clients import ClientLimits

NEWEST_WEIGHT = 0.1
"""Weight of the newest value in the moving average."""
UNKNOWN_RETRY_S = 1.0
"""Seconds before a retry, as long as no slot has ever been released."""
MIN_RETRY_S, MAX_RETRY_S = 0.1, 60.0
RETRY_JITTER = 0.5
"""Maximum share added to retry times, to spread out requests that were refused together."""


class HoldTimes:
    """Tracks how long slots are held: a moving average, and the age of those held now."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held = 0
        self._sum_of_starts = 0.0
        self._mean_s = 0.0

    @property
    def known(self) -> bool:
        return self._mean_s > 0

    @property
    def estimate_s(self) -> float:
        """Seconds a slot is held: the recent average, or the mean age of held slots if longer.

        Without the latter, a hanging target would go unnoticed, since nothing finishes.
        """
        age = self._clock() - self._sum_of_starts / self._held if self._held else 0.0
        return max(self._mean_s, age)

    def begin(self) -> float:
        """Record that a slot was taken, and return the time to pass to `end`."""
        now = self._clock()
        self._held += 1
        self._sum_of_starts += now
        return now

    def held_s(self, began: float) -> float:
        return self._clock() - began

    def end(self, began: float) -> None:
        held = self.held_s(began)
        self._held -= 1
        self._sum_of_starts = self._sum_of_starts - began if self._held else 0.0
        self._mean_s = self._mean_s + NEWEST_WEIGHT * (held - self._mean_s) if self.known else held

    def wait_s(self, place: int, slots: int) -> float:
        """Estimate the wait, in seconds, at `place` in the queue for `slots` slots."""
        return max(0, place) * self.estimate_s / max(1, slots)

    def retry_after_s(self, wait_s: float, slots: int) -> float:
        """Return the seconds before a retry, given the estimated wait for one of `slots` slots."""
        after = max(wait_s, self.estimate_s / max(1, slots))
        if not self.known:
            after = max(after, UNKNOWN_RETRY_S)
        after *= 1 + RETRY_JITTER * random.random()
        return min(max(after, MIN_RETRY_S), MAX_RETRY_S)


REFUSALS = ("queue_full", "wait_too_long", "deadline", "client_limit", "draining", "service_full")
"""Reasons for refusing a request, each counted in the metrics."""
POLL_S = 0.25
"""Seconds between checks of the queue for capacity from new replicas."""
ASKING_S = 0.02
"""Seconds after which a request still waiting for its session must be queued at the service."""


class Admission:
    """Tracks running and waiting generations and admits them in order.

    `capacity` returns how many may run now, and may change at any time; `max_concurrent` of the
    settings, if set, replaces it, and `others` is ignored. A request of more than
    `max_outstanding_tokens` counts as exactly that many, so it runs alone.

    `others` returns how many generations of other orchestrators the services hold, None if they
    neither hold nor queue any. With others, requests ask the service for a slot one at a time, each
    until it is `granted`, so that in the service's queue they take turns with the others' requests.
    """

    def __init__(
        self,
        settings: OrchestratorSettings,
        capacity: Callable[[], int],
        others: Callable[[], int | None] = lambda: None,
        holds: HoldTimes | None = None,
    ) -> None:
        self._capacity, self._others = capacity, others
        if settings.max_concurrent:
            self._capacity, self._others = lambda: settings.max_concurrent, lambda: None
        self._clients = ClientLimits(
            settings.max_concurrent_per_client, settings.max_requests_per_minute_per_client
        )
        self._max_waiting = settings.max_waiting
        self._max_queue_wait_s = settings.max_queue_wait_s
        self._max_tokens = settings.max_outstanding_tokens
        self._holds = holds or HoldTimes()
        self._queue: dict[Visit, asyncio.Future[None]] = {}
        self._queued_tokens = 0
        self._asking: set[Visit] = set()  # running, but not granted a slot yet
        self._arriving = 0  # visits that neither wait nor run yet
        self._poll: asyncio.TimerHandle | None = None
        self.active = 0
        self.outstanding_tokens = 0
        self.refusals = dict.fromkeys(REFUSALS, 0)
        """Refused requests, by reason."""
        self.draining = False

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def slots(self) -> int:
        """Generations that may run here: the capacity that other orchestrators leave free."""
        return max(0, self._capacity() - (self._others() or 0))

    @property
    def refused_total(self) -> int:
        return sum(self.refusals.values()) - self.refusals["draining"]

    def visit(
        self,
        client: str,
        deadline: float | None = None,
        key: ApiKey | None = None,
        counted: bool = True,
    ) -> Visit:
        """Register a request, before anything of it is read.

        `deadline` is in event loop time, `key` the client's API key. If it is `counted`, it counts
        towards the client's requests per minute. It counts as the client's until it is left or
        `end`ed, and takes a place in the queue once it is entered, that is read. Raises
        `UnavailableError` while draining, `ResourceExhaustedError` when there is no capacity or the
        client has reached a limit.
        """
        self._check_arrival(deadline)
        try:
            self._clients.enter(client, self._retry_after(0.0), key, counted)
        except ResourceExhaustedError:
            self.refusals["client_limit"] += 1
            raise
        return Visit(self, client, deadline)

    def drain(self) -> None:
        self.draining = True
        for future in self._queue.values():
            if not future.done():
                self.refusals["draining"] += 1
                future.set_exception(_draining())
        self._queue.clear()
        self._queued_tokens = 0

    def resume(self) -> None:
        self.draining = False

    # --- called by visits ---------------------------------------------------------------------

    def _arrive(self, visit: Visit) -> None:
        self._check_arrival(visit.deadline)
        visit.arriving = True
        self._arriving += 1

    async def _enter(self, visit: Visit, tokens: int) -> None:
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
            self._admit()  # if this visit gave up, the next one may fit

    def _granted(self, visit: Visit) -> None:
        self._asking.discard(visit)
        if self._queue:
            self._admit()

    def _leave(self, visit: Visit) -> None:
        if visit.running:
            visit.running = False
            self._asking.discard(visit)
            self._holds.end(visit.started)
            self.active -= 1
            self.outstanding_tokens -= visit.tokens
            self._admit()

    def _end(self, visit: Visit) -> None:
        self._arrived(visit)
        self._clients.leave(visit.client)

    def _lighten(self, visit: Visit, tokens: int) -> None:
        """Lower a running visit's outstanding tokens to `tokens`."""
        done = visit.tokens - tokens
        if done > 0:
            visit.tokens = tokens
            self.outstanding_tokens -= done
            if self._max_tokens and self._queue:
                self._admit()

    # --- internals ------------------------------------------------------------------------------

    def _check_arrival(self, deadline: float | None) -> None:
        self._check_draining()
        self._check_room(self._place(self._arriving), 0, deadline)

    def _place(self, arriving: int = 0) -> int:
        """Return the queue position of a new request, after `arriving` others; 0 or less: none."""
        place = len(self._queue) + arriving + 1
        if self._others() is None:
            return place if self._queue else place - max(0, self._capacity() - self.active)
        # Counts of others are stale; whether a request is asking the service now is not.
        free = self.slots - self.active
        if not self._asking:
            return place - max(free, 1)
        waits = any(self._holds.held_s(visit.started) > ASKING_S for visit in self._asking)
        return place + 1 if waits else place - free

    def _fits(self, visit: Visit) -> bool:
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
        while self._queue:
            visit, future = next(iter(self._queue.items()))
            if future.done():  # its task was cancelled but has not run since
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
        """Re-check capacity periodically while requests are waiting."""
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
        """Refuse a request at `place` in the queue if the queue is full or the wait too long."""
        capacity = self.slots
        limit = self._max_waiting
        if limit is None:
            limit = max(1, int(WAITING_SHARE * capacity))
        wait = self._wait_s(place, tokens, capacity)
        if place > limit:
            reason = "queue_full"
            why = f"all slots are taken ({self.active} running, {place - 1} waiting)"
        elif self._max_queue_wait_s and wait > self._max_queue_wait_s:
            reason = "wait_too_long"
            why = f"the estimated wait of {wait:.3g} s is too long"
        elif deadline is not None and (left := max(0.0, deadline - _now())) < wait:
            reason = "deadline"
            why = (
                f"the estimated wait is {wait:.3g} s, but the request's deadline is in "
                f"{left:.3g} s; allow more time"
            )
        else:
            return
        self.refusals[reason] += 1
        raise ResourceExhaustedError(why, self._retry_after(wait))

    def _wait_s(self, place: int, tokens: int, capacity: int) -> float:
        """Estimate the wait, in seconds, of a request at `place` in the queue."""
        wait = self._holds.wait_s(place, capacity)
        if self._max_tokens and place > 0:
            # In the time a slot is held, the whole token budget turns over once.
            lacking = self.outstanding_tokens + self._queued_tokens + tokens - self._max_tokens
            wait = max(wait, lacking / self._max_tokens * self._holds.estimate_s)
        return wait

    def _retry_after(self, wait_s: float) -> float:
        return self._holds.retry_after_s(wait_s, self.slots)


class Visit:
    """A request from arrival to end; `async with` releases whatever it holds.

    Raises `DeadlineExceededError` at its deadline, except while `pause`d, when something other than
    the generation is running. `tokens` is how many it may still process.
    """

    def __init__(self, admission: Admission, client: str, deadline: float | None) -> None:
        self._admission = admission
        self._timeout = asyncio.timeout_at(deadline)
        self._total = self._used = 0
        self.client, self.deadline = client, deadline
        self.tokens = 0
        self.started = 0.0
        self.arriving = self.running = False
        self.entered = self._ended = False

    async def __aenter__(self) -> Self:
        self.entered = True
        try:
            self._admission._arrive(self)
        except BaseException:
            self.end()
            raise
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()
        if isinstance(error, ResourceExhaustedError) and error.retry_after_s is None:
            # A service was full: another orchestrator's requests took its slots.
            self._admission.refusals["service_full"] += 1
            error.retry_after_s = self._admission._retry_after(0.0)
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise DeadlineExceededError(
                f"the request's deadline passed after {self._used} of up to {self._total} prompt "
                "and output tokens; allow more time or lower max_tokens"
                if self.started
                else "the request's deadline passed while waiting for a slot; allow more time"
            ) from None

    def end(self) -> None:
        """Release what the request holds; again does nothing."""
        if not self._ended:
            self._ended = True
            self._admission._end(self)

    @contextlib.asynccontextmanager
    async def slot(self, tokens: int) -> AsyncIterator[None]:
        """Wait for a slot and hold it for a request of up to `tokens` prompt and output tokens.

        Raises `ResourceExhaustedError` when the wait would be too long, `UnavailableError` when
        draining.
        """
        self._total = tokens
        try:
            await self._admission._enter(self, tokens)
            yield
        finally:
            self._admission._leave(self)

    def granted(self) -> None:
        """Record that the service granted a slot, so that the next request may ask."""
        self._admission._granted(self)

    def pause(self) -> None:
        """Suspend the deadline until `resume`."""
        if self.deadline is not None:
            self._timeout.reschedule(None)

    def resume(self) -> None:
        """Enforce the deadline again; if it has passed, the visit ends."""
        if self.deadline is not None:
            self._timeout.reschedule(self.deadline)

    def used(self, tokens: int) -> None:
        """Record that `tokens` prompt and output tokens have been processed so far."""
        self._used = tokens
        self._admission._lighten(self, self._total - tokens)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _draining() -> UnavailableError:
    return UnavailableError("the server is draining and accepts no new requests; try another")
