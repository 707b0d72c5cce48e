"""The replicas of one service: probed, and chosen by load and cache affinity.

A replica that stops answering gets no new sessions, but keeps its existing ones, since a draining
service refuses new calls and finishes old ones. A replica that misses two probes in a row counts as
hung: its streams are cut, and their generations move elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from flyspec.errors import FlyspecError, ResourceExhaustedError, UnavailableError
from flyspec.values.admin import BreakerState
from flyspec.values.rounds import SessionStatus
from orchestrator.fleet.breaker import Breaker
from orchestrator.fleet.discovery import Addresses
from orchestrator.upstreams.proposal_checks import DrafterFaultError
from orchestrator.upstreams.protocol import SilentError, Upstream, UpstreamSession

log = logging.getLogger(__name__)

DISCOVER_S = 2.0
SHARED_S = 10.0
"""Seconds for which a replica still counts as shared after other orchestrators' sessions end."""
STICKY_TOKENS = 128
"""Leading prompt tokens that decide which replica's cache may hold the prompt."""
MISSES = 2
"""Unanswered probes after which a replica counts as hung."""
RECONNECT_MISSES = 4
"""Further unanswered probes between reconnects, in case the connection itself is dead."""


MAX_FAULT_CHARACTERS = 400

S = TypeVar("S", bound=Upstream[Any, Any, Any])


class Replica(Generic[S]):
    """One address of a service: its connection, last description and sessions."""

    def __init__(
        self, service: S, breaker: Breaker, misfit: Callable[[S, Any], str] = lambda *_: ""
    ) -> None:
        self.service, self.breaker, self._misfit = service, breaker, misfit
        self.info: Any = None
        self.problem = f"{service.address} has not answered yet"
        """Why the replica cannot be used, regardless of the breaker; empty if it can."""
        self.failure = ""
        """Why its last trial failed; empty if it did not."""
        self.trial_ns = 0
        """Time that its last successful trial took."""
        self.logged = self.problem
        self.listed = True
        self.outstanding = 0
        """Prompt and output tokens that its sessions may still have to process."""
        self.sessions: dict[UpstreamSession, int] = {}
        self.misses = 0
        self.faults_total = 0
        self.last_fault = ""
        """The most recent invalid response."""
        self.disturbed = asyncio.Event()
        self.asking = asyncio.Lock()
        self._trial: UpstreamSession | None = None
        self._shared_at = -math.inf

    @property
    def address(self) -> str:
        return self.service.address

    @property
    def takes_new(self) -> bool:
        """True if the replica is listed and its last probe found no problem."""
        return self.listed and not self.problem

    @property
    def available(self) -> bool:
        """True if the replica can take a session now, ignoring any misfit."""
        return self.takes_new and self.breaker.allows(time.monotonic())

    @property
    def misfit(self) -> str:
        """Why new generations cannot use the replica although it works; empty if they can."""
        return self._misfit(self.service, self.info) if self.info is not None else ""

    @property
    def usable(self) -> bool:
        """True if a new generation may open a session now."""
        return self.available and not self.misfit

    @property
    def reason(self) -> str:
        if self.problem or self.usable:
            return self.problem
        if self.available:
            return self.misfit
        if self.breaker.is_out:
            rest_s = max(0.0, self.breaker.retry_at - time.monotonic())
            return (
                f"out for another {rest_s:.0f} s after {self.faults_total} faults; "
                f"{self.last_fault}"
            )
        return self.failure or f"{self.address} failed recently"

    @property
    def others(self) -> int:
        """Other orchestrators' sessions on the replica, as last reported."""
        return self.info.sessions.others if self.info is not None else 0

    @property
    def shared(self) -> bool:
        """True if other orchestrators have or await sessions here, or did within `SHARED_S`."""
        if self.info is not None and (self.others or self.info.sessions.others_waiting):
            self._shared_at = time.monotonic()
        return time.monotonic() - self._shared_at < SHARED_S

    @property
    def full(self) -> bool:
        """True if all of the replica's sessions are taken, as last reported."""
        return self.others + len(self.sessions) >= self.info.sessions.limit if self.info else False

    def learned(self, sessions: SessionStatus) -> None:
        """Update the session counts with newer ones received outside a probe."""
        if self.info is not None:
            self.info = replace(self.info, sessions=sessions)

    def join(self, session: UpstreamSession, weight: int) -> None:
        """Add a session; `weight` is its share of `outstanding`."""
        if self.breaker.state is BreakerState.HALF_OPEN:
            self._trial = session
        self.breaker.begin(time.monotonic())
        self.sessions[session] = weight
        self.outstanding += weight

    def leave(self, session: UpstreamSession) -> None:
        self.outstanding -= self.sessions.pop(session, 0)
        if session is self._trial:
            self._trial = None
            self.breaker.abandoned()

    def failed(self, error: FlyspecError) -> None:
        if isinstance(error, SilentError):
            self.breaker.hung(time.monotonic())
        else:
            self.breaker.failed(time.monotonic())
        self.disturbed.set()

    def faulted(self, fault: str) -> None:
        """Record an invalid response; after `MAX_FAULTS` of them the replica is out for a while."""
        was_out = self.breaker.is_out
        self.faults_total += 1
        self.last_fault = fault[:MAX_FAULT_CHARACTERS]
        self.breaker.faulted(time.monotonic())
        self.disturbed.set()
        if self.breaker.is_out and not was_out:
            log.error("%s is %s", self.address, self.reason)
            self.cut()

    def cut(self) -> None:
        for session in list(self.sessions):
            session.close()


class Pool(Generic[S]):
    """The replicas of a service.

    `connect` creates a connection to an address, given also the DNS name it was resolved from
    (empty: none). `accept` checks a replica's description and returns why it cannot be used, empty
    if it can; it may prepare the replica first. `misfit` returns why new generations cannot use a
    working replica, given its description; it is evaluated on each use. `trial` has a replica do
    its work once, and returns the time taken, in ns: so no generation has to try one whose breaker
    asks for a trial.
    """

    def __init__(
        self,
        name: str,
        addresses: Addresses,
        connect: Callable[[str, str], S],
        accept: Callable[[S, Any], Awaitable[str]],
        breaker: Callable[[], Breaker] = Breaker,
        interval_s: float = 1.0,
        timeout_s: float = 2.0,
        misfit: Callable[[S, Any], str] = lambda *_: "",
        trial: Callable[[Replica[S]], Awaitable[int]] | None = None,
    ) -> None:
        self.name, self._trial = name, trial
        self._sources = [addresses]
        self._connect, self._accept, self._breaker = connect, accept, breaker
        self._interval_s, self._timeout_s, self._misfit = interval_s, timeout_s, misfit
        self._replicas: dict[str, Replica[S]] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._discoverer: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    @property
    def replicas(self) -> list[Replica[S]]:
        return list(self._replicas.values())

    @property
    def usable(self) -> list[Replica[S]]:
        return [replica for replica in self._replicas.values() if replica.usable]

    @property
    def answering(self) -> list[Replica[S]]:
        """The usable replicas, and those that only rest after failures."""
        return [r for r in self.replicas if r.takes_new and not (r.misfit or r.breaker.is_out)]

    @property
    def reason(self) -> str:
        return "; ".join(r.reason for r in self.replicas if r.reason) or "no address is known"

    async def start(self) -> None:
        """Discover the replicas, probe each once, then keep watching them."""
        await self._discover()
        await asyncio.gather(*(self._probe(replica) for replica in self.replicas))
        for replica in self.replicas:
            self._watch(replica)
        self._discoverer = asyncio.create_task(self._keep_discovering())

    async def add(self, addresses: Addresses) -> list[Replica[S]]:
        """Add addresses, and return the new replicas."""
        before = set(self._replicas)
        self._sources.append(addresses)
        await self._discover()
        added = [r for r in self.replicas if r.address not in before]
        await asyncio.gather(*(self._probe(r) for r in added))
        return added

    async def drop(self, addresses: Addresses) -> None:
        self._sources.remove(addresses)
        await self._discover()

    def choose(
        self,
        prompt: Collection[int],
        weight: int,
        avoid: Collection[Replica[S]] = (),
        among: Sequence[Replica[S]] | None = None,
    ) -> Replica[S] | None:
        """Choose a replica for a session of `weight` tokens; None if none can be used.

        `among` are the candidates (default: all `usable` replicas).

        Prompts with a common beginning go to the same replica, whose cache then holds it, unless
        that replica is clearly busier than the least busy one.
        """
        usable = self.usable if among is None else among
        usable = [replica for replica in usable if replica not in avoid] or usable
        if len(usable) < 2:
            return usable[0] if usable else None
        key = repr(list(prompt)[:STICKY_TOKENS]).encode()
        home = max(usable, key=lambda r: hashlib.blake2b(key + r.address.encode()).digest())
        least = min(usable, key=lambda r: r.outstanding)
        if home.outstanding <= 1.25 * least.outstanding + 2 * weight:
            return home
        return least

    async def changed(self, timeout_s: float) -> None:
        """Wait until any replica's usability changes, at most `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def refresh(self) -> None:
        """Probe all replicas. One that is still being prepared is not waited for."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * self._timeout_s):
                await asyncio.gather(*(self._probe(replica) for replica in self.replicas))

    async def close(self) -> None:
        tasks = [*self._watchers.values(), *filter(None, [self._discoverer])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for replica in self.replicas:
            await replica.service.close()

    async def _keep_discovering(self) -> None:
        while True:
            await asyncio.sleep(DISCOVER_S)
            gone = any(not replica.listed for replica in self.replicas)
            if gone or any(source.changes for source in self._sources):
                await self._discover()

    async def _discover(self) -> None:
        """Add new addresses; retire those that are gone, and remove them once empty."""
        found = [address for source in self._sources for address in await source.find()]
        for address in found:
            if address in self._replicas:
                continue
            names = (source.server_name(address) for source in self._sources)
            replica = Replica(
                self._connect(address, next(filter(None, names), "")),
                self._breaker(),
                self._misfit,
            )
            self._replicas[address] = replica
            if self._discoverer is not None:
                log.info("%s: %s joined", self.name, address)
                self._watch(replica)
        for address, replica in list(self._replicas.items()):
            if replica.listed and address not in found:
                log.info("%s: %s left", self.name, address)
            replica.listed = address in found
            if not replica.listed and not replica.sessions:
                del self._replicas[address]
                if watcher := self._watchers.pop(address, None):
                    watcher.cancel()
                await replica.service.close()

    def _watch(self, replica: Replica[S]) -> None:
        self._watchers[replica.address] = asyncio.create_task(self._keep_probing(replica))

    async def _keep_probing(self, replica: Replica[S]) -> None:
        """Probe the replica periodically, and soon after it fails."""
        while True:
            rest = 0.0 if replica.misses else self._interval_s
            if replica.breaker.state is BreakerState.OPEN:
                rest = min(rest, max(0.0, replica.breaker.retry_at - time.monotonic()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rest):
                    await replica.disturbed.wait()
            if replica.disturbed.is_set():
                replica.disturbed.clear()
                continue  # and wait out its rest
            try:
                await self._probe(replica)
            except Exception:  # keep watching, whatever the service sends
                log.exception("%s at %s", self.name, replica.address)
                await asyncio.sleep(self._interval_s)  # nothing else may pace this loop

    async def _probe(self, replica: Replica[S]) -> None:
        """Probe the replica, one probe at a time, so that misses are consecutive."""
        async with replica.asking:
            await self._ask(replica)

    async def _ask(self, replica: Replica[S]) -> None:
        before = replica.usable
        try:
            info = await replica.service.describe(self._timeout_s)
            if replica.info is None:
                replica.problem = f"{replica.address} is being prepared"
            problem = await self._accept(replica.service, info)
        except SilentError as error:
            replica.misses += 1
            if replica.misses >= MISSES or replica.info is None:
                replica.breaker.failed(time.monotonic())
                self._note(replica, str(error), logging.WARNING)
                replica.cut()
                if (replica.misses - MISSES) % RECONNECT_MISSES == 0:
                    await replica.service.reconnect()
        except FlyspecError as error:
            replica.misses = 0  # it is not silent
            if isinstance(error, DrafterFaultError):
                replica.faulted(str(error))
            else:
                replica.breaker.failed(time.monotonic())
            self._note(replica, str(error), logging.WARNING)
        else:
            replica.misses = 0
            known = replica.info and replica.info.process.instance_id
            if known not in (None, info.process.instance_id):
                replica.breaker.restarted(time.monotonic())
            replica.info, replica.problem = info, problem
            replica.breaker.answered(time.monotonic())
            problem = await self._try(replica)
            self._note(replica, problem, logging.ERROR if problem else logging.WARNING)
        if replica.usable != before:
            self._changed.set()
            self._changed = asyncio.Event()

    async def _try(self, replica: Replica[S]) -> str:
        """Have a replica on trial do its work; return why it cannot be used, empty if it can."""
        breaker = replica.breaker
        if not self._trial or breaker.state is not BreakerState.HALF_OPEN or not replica.usable:
            return replica.problem
        breaker.begin(time.monotonic())
        try:
            replica.trial_ns = await self._trial(replica)
        except ResourceExhaustedError:  # it works, for others
            breaker.abandoned()
        except UnavailableError as error:
            replica.failure = str(error)
            if isinstance(error, DrafterFaultError):
                replica.faulted(str(error))
            else:
                replica.failed(error)
        except FlyspecError as error:
            breaker.abandoned()
            return f"{replica.address} refuses to work: {error}"
        else:
            replica.failure = ""
            breaker.succeeded()
        return ""

    def _note(self, replica: Replica[S], problem: str, level: int) -> None:
        """Record why a replica cannot be used (empty: it can), and log changes."""
        first = replica.info is None
        replica.problem = problem
        reason = problem or replica.misfit or replica.failure
        if reason != replica.logged:
            if reason:
                log.log(logging.DEBUG if first else level, "%s: %s", self.name, reason)
            else:
                log.info("%s: %s is usable", self.name, replica.address)
        replica.logged = reason
