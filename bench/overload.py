"""Ten times the load that can be sustained: `python -m bench.overload --seconds 120`.

Finds the rate that the bundled stack sustains (as many clients as it has slots, each with one
request after the other), then the latency at 80 % of it with Poisson arrivals, once before and once
after the overload; then sends ten times the sustainable rate. Accepted requests must keep their p99
latency within twice that at 80 %, the rest must be refused at once and told when to retry, memory
must stay flat, and soon after the end a request must have a normal latency again.

Exits with 1 if a bound is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from dataclasses import asdict

from bench import command
from bench.admin import left_open, settled
from bench.open_loop import Load, Result, Run
from bench.overload_report import OverloadPhase, OverloadReport, plot, summary, table
from flyspec.bench.prompts import fresh_problems, to_request
from flyspec.cli.bench.common import result_console
from flyspec.cli.stack import Stack, StackOptions
from flyspec.client import AdminClient, Client, GenerateOptions
from flyspec.rules import Rule
from loadtest.measures import percentile
from loadtest.sampler import Memory, Sampler

PROMPTS = 2000
PROBE_EVERY_S = 0.5
"""After the load's end, a request so often: far less than can be sustained."""
SETTLE_S = 30.0


class Overload:
    """A run: the stack, its load, and what is seen of both."""

    def __init__(self, args: argparse.Namespace, stack: Stack, client: Client) -> None:
        self._args, self._stack = args, stack
        prompts = [to_request(p, None) for p in fresh_problems(PROMPTS, args.seed).prompts]
        options = GenerateOptions(
            max_tokens=args.max_tokens,
            ignore_eos=True,
            rule=Rule(args.rule),
            num_speculative_tokens=args.num_speculative_tokens,
        )
        self._load = Load(client, prompts, options, args.seed)
        self._memory: list[Memory] = []

    async def run(self) -> OverloadReport:
        """All of it."""
        args = self._args
        slots = await self._slots()
        await self._load.closed(slots, args.warm_up)
        closed = await self._load.closed(slots, args.calibrate)
        # What was sent late ends after the others: count by the time in which all were busy.
        rate = slots / (sum(closed.latencies()) / max(1, closed.count("complete")))
        report = OverloadReport(slots, rate, args.factor)
        self._say(f"sustainable: {rate:.2f} requests a second with {slots} at once")
        before = await self._load.open(0.8 * rate, args.baseline)
        self._say(f"80 % before: p99 {percentile(before.latencies(), 0.99):.2f} s")
        normal = percentile(before.latencies(), 0.99)
        overload, report.recovery_s = await self._overload(args.factor * rate, normal)
        self._say(f"overload: p99 {percentile(overload.latencies(), 0.99):.2f} s; "
                  f"{overload.count('refused')} refused; normal again after "
                  f"{report.recovery_s:.1f} s")  # fmt: skip
        after = await self._load.open(0.8 * rate, args.baseline)
        report.phases = [
            OverloadPhase.of("capacity", rate, [closed]),
            OverloadPhase.of("80 % before", 0.8 * rate, [before]),
            OverloadPhase.of("80 % after", 0.8 * rate, [after]),
            OverloadPhase.of("80 %", 0.8 * rate, [before, after]),
            OverloadPhase.of("overload", args.factor * rate, [overload]),
        ]
        report.memory = self._memory
        report.errors = _errors([closed, before, overload, after])
        report.results = [asdict(r) for r in overload.results]
        report.left = await self._left()
        return report

    async def _slots(self) -> int:
        """How many generations the services hold."""
        async with AdminClient(self._stack.admin_address) as admin:
            status = await admin.status()
        return min(status.verify.sessions.limit, status.draft.sessions.limit)

    async def _overload(self, rate: float, normal_s: float) -> tuple[Run, float]:
        """The load, with memory watched; and the seconds from its end to a normal latency."""
        pids = {name: service.pid for name, service in self._stack.services.items()}
        begin = time.monotonic()
        sampler = Sampler(pids, None, lambda: time.monotonic() - begin, self._say)
        self._memory = sampler.memory
        recovering: list[asyncio.Task[float]] = []

        async def watch() -> None:
            while True:
                sampler.look()
                await asyncio.sleep(self._args.every)

        def ended() -> None:
            recovering.append(asyncio.create_task(self._recovery(normal_s)))

        watching = asyncio.create_task(watch())
        try:
            run = await self._load.open(rate, self._args.seconds, ended)
            return run, await recovering[0]
        finally:
            for task in (watching, *recovering):
                task.cancel()

    async def _recovery(self, normal_s: float) -> float:
        """Seconds from now until a request is sent that then has a normal latency."""
        begin = time.perf_counter()
        probes: list[asyncio.Task[Result]] = []
        while time.perf_counter() - begin < SETTLE_S:
            now = time.perf_counter() - begin
            probes.append(asyncio.create_task(self._load.one(begin, now)))
            await asyncio.sleep(PROBE_EVERY_S)
            ended = [task.result() for task in probes if task.done()]
            if any(r.outcome == "complete" and r.seconds <= normal_s for r in ended):
                break
        results = await asyncio.gather(*probes)
        normal = (r.sent for r in results if r.outcome == "complete" and r.seconds <= normal_s)
        return min(normal, default=SETTLE_S)

    async def _left(self) -> dict[str, int]:
        """What is open at the end, once it had time to close."""
        async with AdminClient(self._stack.admin_address) as admin:
            return left_open(await settled(admin, 10.0))

    def _say(self, what: str) -> None:
        if self._args.json is not True:
            command.say(what)


def _errors(runs: list[Run]) -> dict[str, int]:
    """What went wrong, counted."""
    failed = Counter(r.error for run in runs for r in run.results if r.outcome == "failed")
    return dict(failed.most_common(10))


async def measure(args: argparse.Namespace) -> OverloadReport:
    """Start the stack and measure."""
    flags = tuple(args.orchestrator_flags.split())
    options = StackOptions(
        log_level="error", max_sessions=args.max_sessions, orchestrator_flags=flags
    )
    async with Stack(options) as stack, Client(stack.address) as client:
        return await stack.guard(Overload(args, stack, client).run())


def parser() -> argparse.ArgumentParser:
    """The flags."""
    found = command.parser("overload", __doc__, plots=True)
    found.add_argument("--seconds", type=float, default=120.0, help="of overload")
    found.add_argument("--factor", type=float, default=10.0, help="of the sustainable rate")
    found.add_argument("--baseline", type=float, default=60.0, help="seconds at 80 %%, twice")
    found.add_argument("--calibrate", type=float, default=30.0, help="seconds at capacity")
    found.add_argument("--warm-up", type=float, default=10.0, help="seconds before all that")
    found.add_argument(
        "--max-tokens", type=int, default=160, help="tokens of an output, on average"
    )
    found.add_argument("--rule", default="exact", help="acceptance rule of the requests")
    found.add_argument("--num-speculative-tokens", type=int, default=8, help="K")
    found.add_argument("--max-sessions", type=int, default=32, help="slots of each service")
    found.add_argument(
        "--orchestrator-flags", default="", help="for the orchestrator: '--max-waiting 4'"
    )
    found.add_argument("--every", type=float, default=1.0, help="seconds between looks at memory")
    found.add_argument("--seed", type=int, default=0)
    return found


def show(report: OverloadReport) -> None:
    """The report for people."""
    console = result_console()
    console.print(table(report))
    console.print(summary(report), markup=False)


def main() -> int:
    """Run it; the exit code."""
    args = parser().parse_args()
    return command.run(
        args, lambda: asyncio.run(measure(args)), OverloadReport.to_document, show,
        lambda r: not r.broken(), plot,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
