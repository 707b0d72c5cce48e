"""The faults and their schedule, all determined by a seed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import chain

from flyspec.errors import FlyspecError
from flyspec.serving import EXIT_LOST
from loadtest.chaos import lying_drafter
from loadtest.chaos.fleet import Member, ProxiedFleet
from loadtest.chaos.lying_drafter import LyingDrafter, Tell
from loadtest.chaos.restartable import Restartable

OUTER = {
    "kill": 4, "drain": 2, "hold": 6, "delay": 4, "stall": 4, "drop": 4, "cut": 4, "forget": 2,
}  # fmt: skip
"""How often each comes: SIGKILL and a restart; SIGTERM and a restart; SIGSTOP for a while; through
the proxy: a delay, silence, silence that ends with a cut, a cut and refusal for a while, silence
for good on the connections there are."""
ILLNESSES = {"device": 1, "raises": 2, "nan": 2, "hang": 2}
"""A restart with a model that fails after some steps (`sick_service`), and another restart."""
LIE, OTHER_WEIGHTS = "lie", "other weights"
"""A drafter that sends what is wrong (`lying_drafter`); a target with another checkpoint."""
KINDS = (*OUTER, *ILLNESSES, LIE, OTHER_WEIGHTS)
RESTARTS = ("kill", "drain", *ILLNESSES, OTHER_WEIGHTS)
CALLS = (5, 60)
"""Steps that a model works before it falls ill, least and most."""
LIES = [lie for lie in lying_drafter.LIES if lie.top_k is None]
"""Those that need no certain question."""
SECONDS = {
    "hold": (1.0, 8.0), "delay": (2.0, 6.0), "stall": (1.0, 8.0), "drop": (1.0, 5.0),
    "cut": (0.0, 2.0), "lie": (1.0, 4.0), "other weights": (2.0, 6.0),
    **dict.fromkeys(ILLNESSES, (20.0, 20.0)),
}  # fmt: skip
"""Shortest and longest of each that does not end by itself; who is ill ends so late at most."""
DELAY_S = (0.02, 0.5)
PAUSE_S = {"target": 9.0, "drafter": 7.0}
"""Mean time between the end of a service's fault and its next one."""
CALM_S = 2.0
"""A service works for so long at least before its next fault."""
BOTH_PAUSE_S = 45.0
"""Mean time between faults of all targets at once."""


@dataclass(frozen=True, slots=True)
class Act:
    """A fault to inject into all of `members` at once after `pause_s`, for `seconds`.

    `number` selects a variant of the kind.
    """

    pause_s: float
    kind: str
    members: Sequence[Member]
    seconds: float = 0.0
    delay_s: float = 0.0
    number: int = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """An injected fault, in seconds since the run began; `service` may be `both targets`."""

    kind: str
    service: str
    role: str
    begun_s: float
    ended_s: float


def random_tracks(fleet: ProxiedFleet, seed: int) -> list[Iterator[Act]]:
    """Return an endless track for every service, and one for all targets at once."""
    tracks = []
    for member in fleet.members:
        rng = random.Random(f"{seed} {member.name}")
        own = {OTHER_WEIGHTS: 2} if member.role == "target" else {LIE: 3}
        weights = {**OUTER, **ILLNESSES, **own}
        tracks.append(_track(rng, [member], PAUSE_S[member.role], weights))
    rng = random.Random(f"{seed} both")
    return [*tracks, _track(rng, fleet.targets, BOTH_PAUSE_S, OUTER)]


def one_of_each(fleet: ProxiedFleet, seed: int) -> list[Iterator[Act]]:
    """Return every kind once, briefly, for targets and drafters in turn, ordered by the seed."""
    quick, *restarts = outer_ones(fleet, seed)
    target, drafter = fleet.targets[-1], fleet.drafters[-1]
    of_target = [Act(0.5, kind, [target], 20.0, number=5) for kind in ("device", "nan")]
    of_drafter = [Act(0.5, kind, [drafter], 20.0, number=5) for kind in ("raises", "hang")]
    more = [
        iter([*of_target, Act(0.5, OTHER_WEIGHTS, [target], 3.0)]),
        iter([*of_drafter, Act(0.5, LIE, [drafter], 2.0, number=seed)]),
    ]
    return [quick, *(chain(one, other) for one, other in zip(restarts, more, strict=True))]


def outer_ones(fleet: ProxiedFleet, seed: int) -> list[Iterator[Act]]:
    """As `one_of_each`, with only those faults that come from outside a service."""
    rng = random.Random(seed)
    kinds = [k for k in OUTER if k not in RESTARTS]
    rng.shuffle(kinds)
    drafter, target = fleet.drafters[0], fleet.targets[0]
    quick = [
        Act(0.5, kind, [(drafter, target)[i % 2]], min(2.0, _seconds(rng, kind)), 0.1)
        for i, kind in enumerate(kinds)
    ]
    # These take a process's start, so they have tracks of their own.
    kill, drain = Act(0.2, "kill", [fleet.targets[-1]]), Act(0.2, "drain", [fleet.drafters[-1]])
    return [iter(quick), iter([kill]), iter([drain])]


def _track(
    rng: random.Random,
    members: Sequence[Member],
    mean_pause_s: float,
    weights: Mapping[str, int],
) -> Iterator[Act]:
    while True:
        (kind,) = rng.choices(list(weights), list(weights.values()))
        yield Act(
            0.2 + rng.expovariate(1 / mean_pause_s),
            kind,
            members,
            _seconds(rng, kind),
            rng.uniform(*DELAY_S),
            rng.randint(*CALLS),
        )


def _seconds(rng: random.Random, kind: str) -> float:
    return rng.uniform(*SECONDS.get(kind, (0.0, 0.0)))


class Saboteur:
    """Plays tracks and records the injected `faults`. Heals every service that it disturbed."""

    def __init__(self, tracks: Sequence[Iterator[Act]], now: Callable[[], float]) -> None:
        self._tracks, self._now = tracks, now
        self._over = asyncio.Event()
        self._restarting = asyncio.Lock()  # one target after the other, or all at once
        self.faults: list[Fault] = []
        self.under_way: dict[str, str] = {}
        """Services that are hurt now, and how."""

    async def play(self, seconds: float | None = None) -> None:
        """Play all tracks to their end, or for this long; faults in progress are then completed."""
        async with asyncio.TaskGroup() as tasks:
            playing = [tasks.create_task(self._play(track)) for track in self._tracks]
            if seconds is not None:
                await asyncio.wait(playing, timeout=seconds)
                self._over.set()

    async def _play(self, track: Iterator[Act]) -> None:
        for act in track:
            if await self._wait(act.pause_s):
                return
            async with AsyncExitStack() as locks:
                for member in act.members:
                    await locks.enter_async_context(member.lock)
                calm_s = max(member.healed_s for member in act.members) + CALM_S - self._now()
                if act.kind in RESTARTS and act.members[0].role == "target":
                    await locks.enter_async_context(self._restarting)
                if await self._wait(max(0.0, calm_s)):
                    return
                await self._do(act)

    async def _wait(self, seconds: float) -> bool:
        """Sleep; return whether the run is over."""
        try:
            async with asyncio.timeout(seconds):
                await self._over.wait()
        except TimeoutError:
            return False
        return True

    async def _do(self, act: Act) -> None:
        service = act.members[0].name if len(act.members) == 1 else "both targets"
        begun = self._now()
        self.under_way[service] = act.kind
        try:
            async with asyncio.TaskGroup() as tasks:
                for member in act.members:
                    tasks.create_task(hurt(member, act))
        finally:
            del self.under_way[service]
            for member in act.members:
                member.healed_s = self._now()
        role = act.members[0].role
        self.faults.append(Fault(act.kind, service, role, begun, self._now()))


async def hurt(member: Member, act: Act) -> None:
    """Inject the fault into a service, and return when it works again."""
    proxy, process, kind, seconds = member.proxy, member.process, act.kind, act.seconds
    match kind:
        case "kill":
            await process.restart(signal.SIGKILL)
        case "drain":
            await process.restart(signal.SIGTERM)
        case "hold":
            process.service.send(signal.SIGSTOP)
            try:
                await asyncio.sleep(seconds)
            finally:
                process.service.send(signal.SIGCONT)
        case "delay":
            proxy.delay_s = act.delay_s
            try:
                await asyncio.sleep(seconds)
            finally:
                proxy.delay_s = 0.0
        case "stall" | "drop":
            proxy.stall()
            try:
                await asyncio.sleep(seconds)
                if kind == "drop":
                    proxy.cut()
            finally:
                proxy.flow()
        case "cut":
            proxy.refusing = True
            proxy.cut()
            try:
                await asyncio.sleep(seconds)
            finally:
                proxy.refusing = False
        case "forget":
            proxy.forget()
        case "lie":
            await _lie(member, LIES[act.number % len(LIES)].tell, seconds)
        case "other weights":
            await process.restart(flags=["--model", str(member.other_model)])
            await asyncio.sleep(seconds)
            await process.restart()
        case _ if kind in ILLNESSES:
            await _be_ill(process, kind, act.number, seconds)
        case _:
            raise ValueError(f"no fault {kind!r}; there are {', '.join(KINDS)}")


async def _be_ill(process: Restartable, kind: str, calls: int, seconds: float) -> None:
    """Have a model fail after so many calls, then start a new process.

    Raises `FlyspecError` if the old one ended with a code other than the one for a restart.
    """
    await process.restart(illness=[kind, str(calls)])
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            code = await process.service.ended()
            if code != EXIT_LOST:
                raise FlyspecError(f"{process.name}, ill: {await process.service.how_it_ended()}")
    await process.restart()


async def _lie(member: Member, tell: Tell, seconds: float) -> None:
    """Let a drafter lie for a while, then replace it by an honest one in a new process."""
    proxy, process = member.proxy, member.process
    async with LyingDrafter(f"127.0.0.1:{process.port}") as liar:
        liar.lie = tell
        proxy.port = int(liar.address.rpartition(":")[2])
        proxy.cut()
        try:
            await asyncio.sleep(seconds)
        finally:
            proxy.port = process.port
            proxy.cut()
    await process.restart()
