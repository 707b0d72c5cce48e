"""`python -m loadtest.chaos`: a fleet under constant load, injected faults, and checks."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from flyspec.bundled import TARGET
from flyspec.cli.options import with_flags
from flyspec.cli.program import run, say, single
from flyspec.cli.stack_options import LOOPBACK
from flyspec.client import AdminClient, AsyncClient
from flyspec.client.recordings import RecordedLine, recording_of
from flyspec.config import VerifySettings
from flyspec.errors import FlyspecError
from flyspec.flags import Flag
from flyspec.tables import make_table
from flyspec_lab.audit import AuditedTarget, Auditor
from flyspec_lab.report import Report, Results
from loadtest.chaos.faults import FAULTS, play
from loadtest.chaos.fleet import proxied_fleet
from loadtest.chaos.work import Request, Work, fault_free
from loadtest.figures import Check, Spread
from loadtest.report import checked
from loadtest.sampler import left_open, resident_mib

SETTLE_S = 45.0
"""So long after the last fault, all has to be as before: longer than it takes keepalive to find out
that a connection was forgotten."""
PROBED_S = 2.0
"""After this time the orchestrator knows what its services say of themselves."""
MAX_GROWTH, MAX_GROWTH_MIB = 1.5, 64.0
"""Maximum memory of the orchestrator at the end: this many times that before, plus this much."""
MAX_SHOWN = 20


# fmt: off
@dataclass(frozen=True)
class ChaosOptions:
    """A run."""

    seconds: Annotated[float, Flag(
        "Seconds of faults; 0: each fault from outside of a service once, on a smaller fleet.",
        min=0,
    )] = 300.0
    streams: Annotated[int, Flag("Concurrent requests.", min=1)] = 32
    texts: Annotated[int, Flag("Number of different texts.", min=1)] = 96
    lossy_share: Annotated[float, Flag("Share of requests with lossy rules.", min=0)] = 0.3
    seed: Annotated[int | None, Flag("Random seed (default: chosen and reported).")] = None
    # fmt: on


async def disturb(options: ChaosOptions) -> Report:
    """Make a run, and judge it. Raises `FlyspecError` when a service does not come back."""
    seed = random.SystemRandom().randrange(1 << 30) if options.seed is None else options.seed
    say(f"seed {seed}; starting the services")
    async with (
        proxied_fleet(small=not options.seconds) as fleet,
        AsyncClient(f"{LOOPBACK}:{fleet.orchestrator.port}", max_retries=0) as client,
    ):
        child = fleet.orchestrator.child
        names = list((await client.list_models()).drafters)
        say(f"drafters: {', '.join(names)}; generating {options.texts} texts without faults")
        texts = await fault_free(client, seed, options.texts)
        warm, begun = resident_mib(child.pid) or 0.0, time.monotonic()
        work = Work(client, texts, ["", *names], options.lossy_share)
        async with asyncio.TaskGroup() as streams:
            for number in range(options.streams):
                streams.create_task(work.stream(random.Random(f"{seed} stream {number}")))
            faults = await play(fleet, seed, options.seconds)
            work.over = True
        seconds = time.monotonic() - begun
        left, lost = await _settle(f"{LOOPBACK}:{child.facts['admin_port']}")
        end = resident_mib(child.pid) or 0.0
    checks = [
        Check("sessions left", not left, f"{left or 'none'}"),
        Check("drafters", not lost, f"not ready again: {sorted(lost) or 'none'}"),
        Check("memory", end <= MAX_GROWTH * warm + MAX_GROWTH_MIB,
              f"orchestrator {warm:.0f} MiB before, {end:.0f} MiB after"),
    ]  # fmt: skip
    return report(f"{seconds:.0f} s, seed {seed}", work.requests, faults, checks)


async def _settle(admin_address: str) -> tuple[dict[str, int], set[str]]:
    """Wait until no session is left and every drafter is ready; return what is not so."""
    deadline = time.monotonic() + SETTLE_S
    async with AdminClient(admin_address) as admin:
        while True:
            await asyncio.sleep(PROBED_S)
            status = await admin.status()
            left = {kind: number for kind, number in left_open(status).items() if number}
            lost = {drafter.address for drafter in status.drafters if not drafter.ready}
            if time.monotonic() > deadline or not (lost or left):
                return left, lost


def judge_again(requests: Sequence[Request]) -> dict[str, str]:
    """Audit lossy texts on a fresh target; return the findings, by request."""
    settings = VerifySettings(model=str(TARGET), threads=1, max_sessions=1)
    auditor, found = Auditor(AuditedTarget.load(settings)), {}
    for request in requests:
        assert request.generation is not None
        try:
            report = auditor.audit(RecordedLine(str(request), recording_of(request.generation)))
            told = "" if report.follows else str(report)
        except FlyspecError as error:
            told = f"cannot be judged again: {error}"
        if told:
            found[str(request)] = told
    return found


def report(
    title: str, requests: Sequence[Request], faults: Sequence[tuple[str, str]], others: list[Check]
) -> Report:
    """Judge the requests of a run, and sum it up, with its faults by kind and service."""
    complete = [(r, r.generation) for r in requests if r.generation is not None]
    lossy = [request for request, _ in complete if request.lossy]
    rounds = sum(len(generation.rounds) for request, generation in complete if request.lossy)
    say(f"judging {rounds} rounds of {len(lossy)} requests again")
    bad = {str(request): request.problem for request in requests if request.problem}
    bad |= judge_again(lossy)
    checks = [
        *(Check(name, False, said) for name, said in list(bad.items())[:MAX_SHOWN]),
        Check("requests", not bad, f"{len(bad)} of {len(requests)} ended badly"),
        *others,
    ]
    delays = defaultdict[str, list[float]](list)
    for _, generation in complete:
        for recovery in generation.completion.recoveries:
            delays[recovery.kind.name.lower().replace("_", " ")].append(recovery.delay_ns / 1e6)
    spreads = {kind: Spread.of(of) for kind, of in sorted(delays.items())}
    counts, services = Counter(faults), sorted({service for _, service in faults})
    by_kind = {f.name: [counts[f.name, service] for service in services] for f in FAULTS}
    ended = {"exact": len(complete) - len(lossy), "lossy": len(lossy)}
    tokens = sum(len(generation.token_ids) for _, generation in complete)
    line = (
        f"{title}: {len(requests)} requests, {ended['exact']} completed with exact, "
        f"{ended['lossy']} with lossy rules ({rounds} rounds judged again); {tokens} tokens"
    )
    return checked(checks, [
        make_table(["fault", *services, "all"], [
            [kind, *map(str, numbers), str(sum(numbers))] for kind, numbers in by_kind.items()]),
        make_table(["recovery", "number", "p50, ms", "p99, ms", "max, ms"], [
            [kind, str(s.count), *(f"{ms:,.0f}" for ms in (s.p50, s.p99, s.max))]
            for kind, s in spreads.items()]),
        line,
    ], {"run": title, "faults": by_kind, "complete": ended, "recoveries": spreads})  # fmt: skip


@with_flags
def chaos(results: Results, options: ChaosOptions) -> None:
    """Inject faults into a fleet of services under load; every stream must go on.

    The fleet has one orchestrator, and behind proxies two targets, two drafters and one with
    another tokenizer. While requests of every kind are streamed, services are killed, drained,
    stopped, delayed, stalled and cut off at random, one at a time and all targets at once.

    With exact, every completed text must equal the one generated before the faults. With lossy
    rules, an audit on a fresh target must find that the text follows from its rounds. No request
    may fail or exceed its deadline; at the end no session may be left, and every drafter must be
    ready again. The exit code is 1 if any of this does not hold; --seed repeats a schedule.
    """
    results.of(lambda: asyncio.run(disturb(options)))


if __name__ == "__main__":
    run(single(chaos))
