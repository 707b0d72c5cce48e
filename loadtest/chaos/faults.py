"""The faults and their schedule, all determined by a seed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from flyspec.errors import FlyspecError
from flyspec.serving import EXIT_LOST
from loadtest.chaos.fleet import ProxiedFleet, Replica
from loadtest.chaos.lying_drafter import LIES, LyingDrafter

OUTER = {
    "kill": 4, "drain": 2, "hold": 6, "delay": 4, "stall": 4, "drop": 4, "cut": 4, "forget": 2,
}  # fmt: skip
"""Faults by frequency: SIGKILL and a restart; SIGTERM and a restart; SIGSTOP for a while; through
the proxy: a delay, silence, silence that ends with a cut, a cut and refusal for a while, silence
for good on the connections there are."""
ILLNESSES = {"device": 1, "raises": 2, "nan": 2, "hang": 2}
"""A restart with a model that fails after some steps (`sick_service`), and another restart."""
LIE, OTHER_WEIGHTS = "lie", "other weights"
"""A drafter that sends what is wrong (`lying_drafter`); a target with another checkpoint."""
KINDS = (*OUTER, *ILLNESSES, LIE, OTHER_WEIGHTS)
RESTARTS = ("kill", "drain", *ILLNESSES, OTHER_WEIGHTS)
SECONDS = {
    "hold": (1.0, 8.0), "delay": (2.0, 6.0), "stall": (1.0, 8.0), "drop": (1.0, 5.0),
    "cut": (0.0, 2.0), "lie": (1.0, 4.0), "other weights": (2.0, 6.0),
    **dict.fromkeys(ILLNESSES, (20.0, 20.0)),
}  # fmt: skip
"""Shortest and longest of each that does not end by itself; who is ill ends so late at most."""
PAUSE_S = {"target": 9.0, "drafter": 7.0}
"""Mean time between the end of a service's fault and its next one."""
BOTH_PAUSE_S = 45.0
"""Mean time between faults of all targets at once."""
CALM_S = 2.0
"""A service works for so long at least before its next fault."""
TELLS = [lie.tell for lie in LIES if lie.top_k is None]
"""Lies that need no certain question."""


@dataclass(slots=True)
class Fault:
    """A fault to inject into all of `replicas` at once after `pause_s`, for `seconds`.

    `number` is the lie's, or the steps that a model works before it falls ill. `begun_s` and
    `ended_s` are known afterwards, in seconds since the run began.
    """

    pause_s: float
    kind: str
    replicas: Sequence[Replica]
    seconds: float = 0.0
    delay_s: float = 0.1
    number: int = 5
    begun_s: float = field(default=0.0, init=False)
    ended_s: float = field(default=0.0, init=False)

    @property
    def service(self) -> str:
        """The name of the service, or `both targets`."""
        return self.replicas[0].name if len(self.replicas) == 1 else "both targets"


Track = Iterator[Fault]


def random_tracks(fleet: ProxiedFleet, seed: int) -> list[Track]:
    """Return an endless track for every service, and one for all targets at once."""
    tracks = []
    for replica in fleet.replicas:
        own = {OTHER_WEIGHTS: 2} if replica.role == "target" else {LIE: 3}
        weights = {**OUTER, **ILLNESSES, **own}
        rng = random.Random(f"{seed} {replica.name}")
        tracks.append(_track(rng, [replica], PAUSE_S[replica.role], weights))
    rng = random.Random(f"{seed} both")
    return [*tracks, _track(rng, fleet.targets, BOTH_PAUSE_S, OUTER)]


def one_of_each(fleet: ProxiedFleet, seed: int, outer_only: bool = False) -> list[Track]:
    """Return every kind once, briefly, for targets and drafters in turn, ordered by the seed.

    Or those alone that come from outside a service.
    """
    rng = random.Random(seed)
    kinds = [kind for kind in OUTER if kind not in RESTARTS]
    rng.shuffle(kinds)
    pair = (fleet.drafters[0], fleet.targets[0])
    quick = [
        Fault(0.5, kind, [pair[i % 2]], min(2.0, rng.uniform(*SECONDS.get(kind, (0.0, 0.0)))))
        for i, kind in enumerate(kinds)
    ]
    target, drafter = [fleet.targets[-1]], [fleet.drafters[-1]]
    # These take a process's start, so they have tracks of their own.
    of_target, of_drafter = [Fault(0.2, "kill", target)], [Fault(0.2, "drain", drafter)]
    if not outer_only:
        of_target += [Fault(0.5, kind, target, 20.0) for kind in ("device", "nan")]
        of_target.append(Fault(0.5, OTHER_WEIGHTS, target, 3.0))
        of_drafter += [Fault(0.5, kind, drafter, 20.0) for kind in ("raises", "hang")]
        of_drafter.append(Fault(0.5, LIE, drafter, 2.0, number=seed))
    return [iter(quick), iter(of_target), iter(of_drafter)]


def _track(
    rng: random.Random, replicas: Sequence[Replica], mean_pause_s: float, weights: Mapping[str, int]
) -> Track:
    while True:
        (kind,) = rng.choices(list(weights), list(weights.values()))
        seconds = rng.uniform(*SECONDS.get(kind, (0.0, 0.0)))
        pause_s = 0.2 + rng.expovariate(1 / mean_pause_s)
        yield Fault(pause_s, kind, replicas, seconds, rng.uniform(0.02, 0.5), rng.randint(5, 60))


class Saboteur:
    """Plays tracks and records the injected `faults`. Heals every service that it disturbed."""

    def __init__(self, fleet: ProxiedFleet, now: Callable[[], float]) -> None:
        self._fleet, self._now = fleet, now
        self._over = asyncio.Event()
        self._restarting = asyncio.Lock()  # one target after the other, or all at once
        self.faults: list[Fault] = []

    async def play(self, tracks: Sequence[Track], seconds: float | None = None) -> None:
        """Play all tracks to their end, or for this long; faults in progress are then completed."""
        async with asyncio.TaskGroup() as tasks:
            playing = [tasks.create_task(self._play(track)) for track in tracks]
            if seconds is not None:
                await asyncio.wait(playing, timeout=seconds)
                self._over.set()

    async def _play(self, track: Track) -> None:
        for fault in track:
            if await self._wait(fault.pause_s):
                return
            async with AsyncExitStack() as locks:
                for replica in fault.replicas:
                    await locks.enter_async_context(replica.lock)
                if fault.kind in RESTARTS and fault.replicas[0].role == "target":
                    await locks.enter_async_context(self._restarting)
                healed_s = max(replica.healed_s for replica in fault.replicas)
                if await self._wait(max(0.0, healed_s + CALM_S - self._now())):
                    return
                fault.begun_s = self._now()
                try:
                    async with asyncio.TaskGroup() as tasks:
                        for replica in fault.replicas:
                            tasks.create_task(self._hurt(replica, fault))
                finally:
                    for replica in fault.replicas:
                        replica.healed_s = self._now()
                fault.ended_s = self._now()
                self.faults.append(fault)

    async def _wait(self, seconds: float) -> bool:
        """Sleep; return whether the run is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._over.wait()
        return self._over.is_set()

    async def _hurt(self, replica: Replica, fault: Fault) -> None:
        """Inject the fault into a service, and return when it works again."""
        proxy = replica.proxy
        match fault.kind:
            case "kill":
                await replica.restart(signal.SIGKILL)
            case "drain":
                await replica.restart(signal.SIGTERM)
            case "forget":
                proxy.forget()
            case "lie":
                await _lie(replica, fault)
            case "other weights":
                await replica.restart(flags=["--model", str(self._fleet.other_model)])
                await asyncio.sleep(fault.seconds)
                await replica.restart()
            case kind if kind in ILLNESSES:
                await _be_ill(replica, fault)
            case kind:
                try:
                    if kind == "hold":
                        replica.child.send(signal.SIGSTOP)
                    elif kind == "delay":
                        proxy.delay_s = fault.delay_s
                    elif kind == "cut":
                        proxy.refusing = True
                        proxy.cut()
                    else:
                        proxy.stall()
                    await asyncio.sleep(fault.seconds)
                    if kind == "drop":
                        proxy.cut()
                finally:  # whichever it was
                    replica.child.send(signal.SIGCONT)
                    proxy.delay_s, proxy.refusing = 0.0, False
                    proxy.flow()


async def _be_ill(replica: Replica, fault: Fault) -> None:
    """Have a model fail after so many steps, then start a new process.

    Raises `FlyspecError` if the old one ended with a code other than the one for a restart.
    """
    await replica.restart(illness=[fault.kind, str(fault.number)])
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(fault.seconds):
            if await replica.child.ended() != EXIT_LOST:
                raise FlyspecError(f"{replica.name}, ill: {await replica.child.how_it_ended()}")
    await replica.restart()


async def _lie(replica: Replica, fault: Fault) -> None:
    """Let a drafter lie for a while, then replace it by an honest one in a new process."""
    proxy = replica.proxy
    async with LyingDrafter(f"127.0.0.1:{replica.port}") as liar:
        liar.lie = TELLS[fault.number % len(TELLS)]
        proxy.port = int(liar.address.rpartition(":")[2])
        proxy.cut()
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            proxy.port = replica.port
            proxy.cut()
    await replica.restart()
