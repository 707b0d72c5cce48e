"""A run: a fleet under constant load, injected faults, and the checks at the end."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from flyspec.client import AdminClient, AsyncClient
from flyspec.errors import FlyspecError
from loadtest.chaos.faults import Saboteur, one_of_each, outer_ones, random_tracks
from loadtest.chaos.fleet import FOREIGN_DRAFTER, ProxiedFleet
from loadtest.chaos.replay import Replay
from loadtest.chaos.report import ChaosResult
from loadtest.chaos.work import ChaosOptions, Request, Work, drafts, fill_in, texts

SETTLE_S = 45.0
"""So long after the last fault, all has to be as before: a service finds out by keepalive that a
connection was forgotten, and only then gives up the sessions on it."""
PROGRESS_S = 10.0
SLOW_S = 40.0
"""A request that takes so long is mentioned."""


async def run(options: ChaosOptions, say: Callable[[str], None] = lambda _: None) -> ChaosResult:
    """Make a whole run. Raises `FlyspecError` when a service does not come back."""
    seed = random.SystemRandom().randrange(1 << 30) if options.seed is None else options.seed
    say(f"seed {seed}")
    result = ChaosResult(seed, options.streams, options.fleet.dtype)
    async with (
        ProxiedFleet(options.fleet) as fleet,
        AsyncClient(fleet.address, max_retries=0) as client,
    ):
        requests = await _ChaosRun(options, fleet, client, result, say).go()
    result.count(requests)
    result.check_memory()
    await _replay(options, result, requests, say)
    return result


class _ChaosRun:
    """What happens while the fleet is up."""

    def __init__(
        self,
        options: ChaosOptions,
        fleet: ProxiedFleet,
        client: AsyncClient,
        result: ChaosResult,
        say: Callable[[str], None],
    ) -> None:
        self._options, self._fleet, self._client = options, fleet, client
        self._result, self._say = result, say

    async def go(self) -> list[Request]:
        o, fleet, result = self._options, self._fleet, self._result
        names = await self._drafters()
        self._say(f"drafters: {', '.join(names)}; generating {o.texts} texts without faults")
        wanted = texts(result.seed, o.texts)
        await fill_in(self._client, wanted)
        warm = fleet.orchestrator_mib
        begun = time.monotonic()

        def now() -> float:
            return time.monotonic() - begun

        work = Work(self._client, o, result.seed, wanted, ["", *names], now)
        once = one_of_each if o.ill else outer_ones
        plan = once if o.once else random_tracks
        saboteur = Saboteur(plan(fleet, result.seed), now)
        self._say("hurting it")
        working = asyncio.create_task(work.run())
        progress = asyncio.create_task(self._tell(work, saboteur, now))
        try:
            await saboteur.play(None if o.once else o.seconds)
            work.finish()
            await working
        finally:
            for task in (working, progress):
                task.cancel()
            await asyncio.gather(working, progress, return_exceptions=True)
        result.seconds = now()
        result.faults = sorted(saboteur.faults, key=lambda fault: fault.begun_s)
        self._say("looking at what is left")
        await self._settle(names)
        result.orchestrator_mib = warm, fleet.orchestrator_mib
        return work.requests

    async def _drafters(self) -> list[str]:
        """Return the drafters' names once all are available."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            names = list((await self._client.list_models()).drafters)
            if self._options.fleet.no_foreign or FOREIGN_DRAFTER in names:
                return names
            if time.monotonic() > deadline:
                raise FlyspecError(f"no drafter {FOREIGN_DRAFTER!r} among {', '.join(names)}")
            await asyncio.sleep(0.1)

    async def _tell(self, work: Work, saboteur: Saboteur, now: Callable[[], float]) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            done = [r for r in work.requests if r.ended_s]
            bad = sum(bool(r.problem) for r in done)
            hurt = ", ".join(f"{what} {name}" for name, what in saboteur.under_way.items())
            self._say(
                f"{now():4.0f} s: {len(done)} requests done, {bad} of them badly; "
                f"{len(saboteur.faults)} faults; now: {hurt or 'none'}"
            )
            oldest = next((r for r in work.requests if not r.ended_s), None)
            if oldest is not None and now() - oldest.begun_s > SLOW_S:
                tokens = sum(number for _, number in oldest.arrivals)
                self._say(f"        {oldest} has {tokens} tokens in {now() - oldest.begun_s:.0f} s")

    async def _settle(self, names: list[str]) -> None:
        """Wait until no session is left and every drafter drafts again; note those that do not."""
        result, deadline = self._result, time.monotonic() + SETTLE_S
        lacking = set(names)
        while True:
            left = await self._left()
            for name in list(lacking):
                if await drafts(self._client, name):
                    lacking.discard(name)
            if time.monotonic() > deadline or not (lacking or any(left.values())):
                break
            await asyncio.sleep(0.2)
        result.sessions_left = left
        result.violations += [f"{n} sessions left at {name}" for name, n in left.items() if n]
        result.violations += [f"{name} does not draft again" for name in sorted(lacking)]

    async def _left(self) -> dict[str, int]:
        """Return the sessions that each service reports, and the orchestrator's generations."""
        left = {}
        for member in self._fleet.members:
            try:
                left[member.name] = await member.num_sessions()
            except FlyspecError:
                left[member.name] = -1
        async with AdminClient(self._fleet.admin_address) as admin:
            status = await admin.status()
        left["the orchestrator"] = status.active_generations + status.waiting_generations
        return left


async def _replay(
    options: ChaosOptions, result: ChaosResult, requests: list[Request], say: Callable[[str], None]
) -> None:
    """Judge lossy texts again; differences are violations."""
    lossy = [r for r in requests if r.lossy and r.generation is not None]
    rounds = sum(len(r.generation.rounds) for r in lossy if r.generation is not None)
    say(f"replaying {rounds} rounds of {len(lossy)} requests")
    with Replay(options.fleet.dtype) as replay:
        for number, problem in sorted((await replay.check_all(lossy)).items()):
            result.violations.append(f"request {number}, judged again: {problem}")
    result.replayed_rounds = rounds
