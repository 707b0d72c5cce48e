"""The faults, each a context in which a service suffers it, and their schedule by a seed."""

from __future__ import annotations

import asyncio
import math
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

from flyspec.bundled import DRAFT
from flyspec.cli.program import say
from flyspec.errors import FlyspecError
from flyspec.serving import EXIT_LOST
from loadtest.chaos.fleet import Fleet, Replica, Role
from loadtest.chaos.lying_drafter import LIES, LyingDrafter

PAUSE_S = {"target": 9.0, "drafter": 7.0}
"""Mean time between the end of a service's fault and its next one."""
BOTH, BOTH_PAUSE_S = "both targets", 45.0
"""Faults of all targets at once, and the mean time between them."""
CALM_S = 2.0
"""A service works for so long at least before its next fault."""
ONCE_S, ONCE_PAUSE_S = 2.0, 0.3
"""Longest fault and mean pause of a run that has each of them once."""
TELLS = [lie.tell for lie in LIES if lie.top_k is None]
"""Lies that need no certain question."""
Suffering = AsyncIterator[None]


@asynccontextmanager
async def _until(
    begin: Callable[[Replica], object],
    end: Callable[[Replica], object],
    replica: Replica,
    rng: random.Random,
) -> Suffering:
    """Disturb a process or its connections, and end that."""
    begin(replica)
    try:
        yield
    finally:
        end(replica)


def _refuse(replica: Replica) -> None:
    replica.proxy.refusing = True
    replica.proxy.cut()


def _drop(replica: Replica) -> None:
    replica.proxy.cut()
    replica.proxy.flow()


@asynccontextmanager
async def _ended(how: signal.Signals, replica: Replica, rng: random.Random) -> Suffering:
    """End the process; then another one starts."""
    await replica.end(how)
    yield
    await replica.restart()


@asynccontextmanager
async def _otherwise(
    flags: Sequence[str], illness: str, replica: Replica, rng: random.Random
) -> Suffering:
    """Restart the process with more flags, or with a model that fails after some steps.

    Raises `FlyspecError` if it ends with a code other than the one for a restart.
    """
    await replica.restart([illness, str(rng.randint(5, 60))] if illness else (), flags)
    yield
    if replica.child.process.returncode not in (None, EXIT_LOST):
        raise FlyspecError(f"{replica.name}, ill: {await replica.child.how_it_ended()}")
    await replica.restart()


@asynccontextmanager
async def _lying(replica: Replica, rng: random.Random) -> Suffering:
    """Let a drafter lie, then replace it by an honest one in a new process."""
    async with LyingDrafter(f"127.0.0.1:{replica.port}") as liar:
        liar.lie = rng.choice(TELLS)
        replica.proxy.port = int(liar.address.rpartition(":")[2])
        replica.proxy.cut()
        try:
            yield
        finally:
            replica.proxy.port = replica.port
            replica.proxy.cut()
    await replica.restart()


@dataclass(frozen=True)
class Fault:
    """A kind of fault: `weight` is its frequency, `seconds` its shortest and longest duration.

    Those that are `inner` are not for all targets at once. A fault that `restarts` takes the start
    of a process; one with a `role` is for such services alone.
    """

    name: str
    inject: Callable[[Replica, random.Random], AbstractAsyncContextManager[None]]
    weight: int
    seconds: tuple[float, float]
    restarts: bool = False
    inner: bool = False
    role: Role | None = None


# fmt: off
FAULTS = (
    Fault("kill", partial(_ended, signal.SIGKILL), 4, (0.0, 0.0), restarts=True),
    Fault("drain", partial(_ended, signal.SIGTERM), 2, (0.0, 0.0), restarts=True),
    Fault("hold", partial(_until, lambda r: r.child.send(signal.SIGSTOP),
                          lambda r: r.child.send(signal.SIGCONT)), 6, (1.0, 8.0)),
    Fault("delay", partial(_until, lambda r: setattr(r.proxy, "delay_s", 0.25),
                           lambda r: setattr(r.proxy, "delay_s", 0.0)), 4, (2.0, 6.0)),
    Fault("stall", partial(_until, lambda r: r.proxy.stall(), lambda r: r.proxy.flow()),
          4, (1.0, 8.0)),
    Fault("drop", partial(_until, lambda r: r.proxy.stall(), _drop), 4, (1.0, 5.0)),
    Fault("cut", partial(_until, _refuse, lambda r: setattr(r.proxy, "refusing", False)),
          4, (0.0, 2.0)),
    Fault("forget", partial(_until, lambda r: r.proxy.forget(), lambda _: None), 2, (0.0, 0.0)),
    *(Fault(illness, partial(_otherwise, (), illness), weight, (20.0, 20.0), True, True)
      for illness, weight in (("device", 1), ("raises", 2), ("nan", 2), ("hang", 2))),
    Fault("lie", _lying, 3, (1.0, 4.0), True, True, "drafter"),
    Fault("other weights", partial(_otherwise, ("--model", str(DRAFT)), ""), 2, (2.0, 6.0), True,
          True, "target"),
)
# fmt: on
"""Held back and cut off by the proxy: `delay` adds time, `stall` forwards later, `drop` cuts what
was held back, `cut` also refuses new connections, `forget` is silence on existing ones for good."""
OUTER = [fault for fault in FAULTS if not fault.inner]


async def play(fleet: Fleet, seed: int, seconds: float) -> list[tuple[str, str]]:
    """Inject random faults for so long, or each of `OUTER` once, and shortly, if that is 0.

    Returns each with the service's name, or `BOTH`.
    """
    done: list[tuple[str, str]] = []
    until = time.monotonic() + (seconds or math.inf)
    restarting = asyncio.Lock()  # of targets: one after the other, or all at once

    async def track(
        name: str, replicas: Sequence[Replica], faults: Sequence[Fault], pause_s: float
    ) -> None:
        rng = random.Random(f"{seed} {name}")
        weights, left = [fault.weight for fault in faults], [*faults]
        while seconds or left:
            pause = 0.2 + rng.expovariate(1 / pause_s)
            await asyncio.sleep(min(pause, max(0.0, until - time.monotonic())))
            if time.monotonic() >= until:
                return
            fault = rng.choices(faults, weights)[0] if seconds else left.pop(0)
            async with AsyncExitStack() as held:
                for replica in replicas:
                    await held.enter_async_context(replica.lock)
                if fault.restarts and replicas[0].role == "target":
                    await held.enter_async_context(restarting)
                duration = min(rng.uniform(*fault.seconds), math.inf if seconds else ONCE_S)
                await asyncio.gather(*(_suffer(fault, r, rng, duration) for r in replicas))
                done.append((fault.name, name))
                say(f"{fault.name}: {name}, {duration:.1f} s")
                await asyncio.sleep(CALM_S)

    async with asyncio.TaskGroup() as tasks:
        for number, replica in enumerate(fleet.replicas):
            own = [fault for fault in FAULTS if fault.role in (None, replica.role)]
            mine = own if seconds else OUTER[number :: len(fleet.replicas)]
            pause_s = PAUSE_S[replica.role] if seconds else ONCE_PAUSE_S
            tasks.create_task(track(replica.name, [replica], mine, pause_s))
        if seconds:
            tasks.create_task(track(BOTH, fleet.targets, OUTER, BOTH_PAUSE_S))
    return done


async def _suffer(fault: Fault, replica: Replica, rng: random.Random, seconds: float) -> None:
    """Inject the fault into a service for so long, or until its process ends."""
    async with fault.inject(replica, rng):
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await replica.child.ended()
