"""How long does a stream stand still? `python -m bench.recovery`.

Streams of long texts run with `exact`; in the midst of them a service is killed or held (SIGSTOP:
it hangs). Measured is each stream's longest pause from then on, less its median pause before.

- A drafter that is killed or hangs may cost one round's deadline (`--draft-timeout`) and one
  re-open. What opening sessions takes is measured: as many new prompts at once, each as long as
  the streams' sequences become, to their first token.
- A target that is killed and started again, or hangs for a while, may cost that time and 1 s.

Every text must be the fault-free one. Exits with 1 if a bound or a text does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

from bench import command
from bench.chaos.fleet import FleetOptions, ProxiedFleet
from bench.chaos.work import EXACT, Request, TextJob, ask, drafts, now_since
from bench.command import print_table
from flyspec.client import Client, GenerateOptions
from flyspec.errors import FlyspecError

ALLOWANCE_S = 1.0
"""What a target's absence may cost beyond itself."""
PAUSE_S = 3.0
TIMEOUT_S = 300.0
_CODE = "import os\n\n\ndef read_lines(path):\n"


@dataclass(frozen=True, slots=True)
class Case:
    """What is done to whom; `drafters` are the replicas that there are."""

    name: str
    drafters: int
    role: str
    kind: str


CASES = (
    Case("drafter killed, no other", 1, "drafter", "kill"),
    Case("drafter hangs, no other", 1, "drafter", "hold"),
    Case("drafter killed, a second one", 2, "drafter", "kill"),
    Case("drafter hangs, a second one", 2, "drafter", "hold"),
    Case("target killed and restarted", 1, "target", "restart"),
    Case("target hangs for 3 s", 1, "target", "pause"),
)


@dataclass(frozen=True, slots=True)
class CaseResult:
    """A case as it went; times in seconds."""

    name: str
    streams: int
    added_p50_s: float
    added_max_s: float
    bound_s: float
    bound_of: str
    recoveries: dict[str, int]
    problems: list[str]

    @property
    def passed(self) -> bool:
        """Whether the bound and all texts held."""
        return self.added_max_s <= self.bound_s and not self.problems


class RecoveryRun:
    """The measurements on one fleet."""

    def __init__(self, args: argparse.Namespace, fleet: ProxiedFleet, client: Client) -> None:
        self._args, self._fleet, self._client = args, fleet, client
        self._jobs = [self._job(number) for number in range(args.streams)]
        self._now = now_since(time.monotonic())
        self.open_s = 0.0

    def _job(self, number: int) -> TextJob:
        options = GenerateOptions(seed=number, max_tokens=self._args.max_tokens, ignore_eos=True)
        return TextJob(f"# {number}\n{_CODE}", options)

    async def prepare(self) -> None:
        """Texts without faults, and what it takes to open sessions of their length."""
        await self._healthy()
        requests, streams = self._begin()
        await streams
        for request in requests:
            if request.problem:
                raise FlyspecError(f"without any fault: {request.problem}")
            request.job.expected = request.generation
        rng = random.Random(0)
        vocabulary = (await self._client.list_models()).target.vocab_size
        prompts = [rng.choices(range(8, vocabulary), k=self._args.max_tokens) for _ in requests]
        options = GenerateOptions(max_tokens=2, num_speculative_tokens=1, rule=EXACT)
        began = self._now()
        await asyncio.gather(*(self._client.complete(prompt, options) for prompt in prompts))
        self.open_s = self._now() - began

    async def measure(self, case: Case) -> CaseResult:
        """One case, healed at its end."""
        await self._healthy()
        requests, streams = self._begin()
        while any(sum(n for _, n in r.arrivals) < self._args.max_tokens // 4 for r in requests):
            if streams.done():
                raise FlyspecError(f"{case.name}: the streams ended before the fault")
            await asyncio.sleep(0.01)
        members = self._fleet.targets if case.role == "target" else self._fleet.drafters
        used = [await member.num_sessions() for member in members]
        process = members[used.index(max(used))].process
        hurt_s = self._now()
        try:
            if case.kind == "restart":
                await process.restart()
            elif case.kind == "kill":
                await process.end()
            else:
                process.service.send(signal.SIGSTOP)
                if case.kind == "pause":
                    await asyncio.sleep(PAUSE_S)
                    process.service.send(signal.SIGCONT)
            lasted_s = self._now() - hurt_s
            await streams
        finally:
            process.service.send(signal.SIGCONT)
        if case.kind == "kill":
            await process.spawn()
            await process.ready()
        if case.role == "target":
            bound_s, bound_of = lasted_s + ALLOWANCE_S, f"{lasted_s:.2f} s without it, 1 s more"
        else:
            bound_s = self._args.draft_timeout + self.open_s
            bound_of = f"deadline {self._args.draft_timeout:g} s, re-open {self.open_s:.2f} s"
        return _row(case, requests, hurt_s, bound_s, bound_of)

    def _begin(self) -> tuple[list[Request], asyncio.Future[list[None]]]:
        """All streams, under way."""
        requests = []
        for number, job in enumerate(self._jobs):
            options = replace(job.options, rule=EXACT, num_speculative_tokens=self._args.k)
            requests.append(Request(number, job, options, self._now()))
        asking = (ask(self._client, r, self._now, TIMEOUT_S) for r in requests)
        return requests, asyncio.gather(*asking)

    async def _healthy(self) -> None:
        """Wait until the drafter drafts."""
        async with asyncio.timeout(60.0):
            while not await drafts(self._client, "model"):  # noqa: ASYNC110
                await asyncio.sleep(0.1)


def _row(
    case: Case, requests: Sequence[Request], hurt_s: float, bound_s: float, bound_of: str
) -> CaseResult:
    added = []
    recoveries: Counter[str] = Counter()
    for request in requests:
        gaps = list(pairwise(at for at, _ in request.arrivals))
        usual = statistics.median(b - a for a, b in gaps if b <= hurt_s)
        added.append(max((b - a for a, b in gaps if b > hurt_s), default=0.0) - usual)
        if request.generation is not None:
            recoveries.update(r.kind.name for r in request.generation.completion.recoveries)
    problems = [f"stream {r.number}: {r.problem}" for r in requests if r.problem]
    return CaseResult(case.name, len(requests), statistics.median(added), max(added), bound_s,
                      bound_of, dict(recoveries), problems)  # fmt: skip


def _show(rows: Sequence[CaseResult]) -> None:
    """The table, in Markdown."""
    print_table(
        ("case", "added, median, s", "added, longest, s", "bound, s", "what bounds it",
         "recoveries"),
        [
            (row.name, f"{row.added_p50_s:.2f}", f"{row.added_max_s:.2f}", f"{row.bound_s:.2f}",
             row.bound_of,
             ", ".join(f"{n} {kind.lower().replace('_', ' ')}"
                       for kind, n in row.recoveries.items()) or "none")
            for row in rows
        ],
    )  # fmt: skip
    for row in rows:
        for problem in row.problems:
            print(f"VIOLATION: {row.name}: {problem}")
        if row.added_max_s > row.bound_s:
            print(f"VIOLATION: {row.name}: a stream stood still for longer than the bound")


async def run(args: argparse.Namespace) -> list[CaseResult]:
    """All cases, on a fleet for each number of drafters."""
    rows = []
    for number in sorted({case.drafters for case in CASES}):
        options = FleetOptions(
            targets=1,
            drafters=number,
            foreign=False,
            dtype=args.dtype,
            draft_timeout_s=args.draft_timeout,
        )
        async with ProxiedFleet(options) as fleet, Client(fleet.address) as client:
            recovery = RecoveryRun(args, fleet, client)
            await recovery.prepare()
            for case in CASES:
                if case.drafters == number:
                    rows.append(await recovery.measure(case))
                    command.say(f"{case.name}: {rows[-1].added_max_s:.2f} s")
    return rows


def main() -> int:
    """Run it; the exit code."""
    parser = command.parser("recovery", __doc__)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=800, help="length of the texts")
    parser.add_argument("--k", type=int, default=15, help="drafts a round")
    parser.add_argument("--draft-timeout", type=float, default=1.0, help="a proposal's deadline, s")
    parser.add_argument("--dtype", default="auto", help="the target's numbers")
    args = parser.parse_args()
    return command.run(
        args, lambda: asyncio.run(run(args)), lambda rows: [asdict(row) for row in rows], _show,
        lambda rows: all(row.passed for row in rows),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
