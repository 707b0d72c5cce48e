"""Several orchestrators over the same slots: `python -m bench.sharing --orchestrators 2`.

Finds the rate that the bundled stack sustains, then sends 1.5 times that with Poisson arrivals: to
one orchestrator, then in turn to several over the same services. With several, p99 time to first
token of what is admitted must be within 1.5 times that with one, slots must go by arrival within a
second, and the rest must be refused with when to retry.

Exits with 1 if a bound is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

from bench import command
from bench.open_loop import Load, Result, Run
from flyspec.bench.prompts import fresh_problems, to_request
from flyspec.cli.bench.common import result_console
from flyspec.cli.service import Child
from flyspec.cli.stack import LOOPBACK, Stack, StackOptions
from flyspec.client import Client, GenerateOptions
from flyspec.rules import Rule
from flyspec.tables import Table, make_table
from loadtest.measures import percentile

PROMPTS = 2000
MAX_TTFT_RATIO = 1.5
"""p99 time to first token of what is admitted, with several orchestrators over that with one."""
MAX_OVERTAKEN_S = 1.0
"""A request gets its slot before those that arrived so much later."""


def overtaken_s(results: Sequence[Result]) -> float:
    """By how much later a request arrived that had its slot before another, at most; seconds."""
    served = [(r.sent + r.started_s, r.sent) for r in results if r.started_s is not None]
    worst = latest = 0.0
    for _, sent in sorted(served):
        worst, latest = max(worst, latest - sent), max(latest, sent)
    return worst


@dataclass(frozen=True, slots=True)
class SharingPhase:
    """Requests to so many orchestrators. Seconds; times to first token are of what completed."""

    orchestrators: int
    rate: float
    sent: int
    completed: int
    refused: int
    failed: int
    first_token_p50_s: float
    first_token_p99_s: float
    refusal_p99_s: float
    refusals_without_retry: int
    overtaken_s: float

    @classmethod
    def of(cls, orchestrators: int, rate: float, run: Run) -> SharingPhase:
        """Sum up a run."""
        first = [r.first_token_s for r in run.results if r.outcome == "complete"]
        times = sorted(seconds for seconds in first if seconds is not None)
        refused = [r for r in run.results if r.outcome == "refused"]
        return cls(
            orchestrators=orchestrators,
            rate=rate,
            sent=len(run.results),
            completed=run.count("complete"),
            refused=len(refused),
            failed=run.count("failed"),
            first_token_p50_s=percentile(times, 0.5),
            first_token_p99_s=percentile(times, 0.99),
            refusal_p99_s=percentile([r.seconds for r in refused], 0.99),
            refusals_without_retry=sum(r.retry_after_s is None for r in refused),
            overtaken_s=overtaken_s(run.results),
        )


@dataclass(frozen=True, slots=True)
class SharingReport:
    """One orchestrator, and several, at the same rate."""

    slots: int
    sustainable_rate: float
    alone: SharingPhase
    several: SharingPhase

    @property
    def ratio(self) -> float:
        """p99 time to first token with several over that with one."""
        return self.several.first_token_p99_s / self.alone.first_token_p99_s

    def broken(self) -> list[str]:
        """The bounds that did not hold, in words."""
        several = self.several
        checks = [
            (self.ratio <= MAX_TTFT_RATIO,
             f"p99 time to first token is {self.ratio:.2f} times that with one orchestrator, "
             f"bound {MAX_TTFT_RATIO:g}"),
            (several.overtaken_s <= MAX_OVERTAKEN_S,
             f"a request was overtaken by one that arrived {several.overtaken_s:.2f} s later, "
             f"bound {MAX_OVERTAKEN_S:g} s"),
            (several.refused > 0, "nothing was refused: the load was none"),
            (several.refusals_without_retry == 0,
             f"{several.refusals_without_retry} refusals do not say when to retry"),
            (several.failed == 0, f"{several.failed} requests failed"),
        ]  # fmt: skip
        return [why for holds, why in checks if not holds]

    def to_document(self) -> dict[str, Any]:
        """For JSON."""
        broken = self.broken()
        return {**asdict(self), "ratio": self.ratio, "broken": broken, "passed": not broken}


@asynccontextmanager
async def further_orchestrator(stack: Stack, name: str) -> AsyncIterator[str]:
    """Another orchestrator over the services of a stack; its address."""
    flags = [
        "--host", LOOPBACK, "--admin-host", LOOPBACK, "--port", "0", "--admin-port", "0",
        "--log-level", "error", "--verify-address", stack.verify_address,
        "--draft-address", stack.draft_address, "--upstream-tls", "false",
        *stack.options.orchestrator_flags,
    ]  # fmt: skip
    child = await Child.start(name, "orchestrator", flags, 1, lambda _: None)
    try:
        await child.ready()
        yield f"{LOOPBACK}:{child.facts['port']}"
    finally:
        child.send(signal.SIGTERM)
        await child.ended()


async def measure(args: argparse.Namespace) -> SharingReport:
    """Start the stack and the further orchestrators, and measure."""
    options = StackOptions(log_level="error", max_sessions=args.max_sessions)
    async with AsyncExitStack() as exits:
        stack = await exits.enter_async_context(Stack(options))
        addresses = [stack.address]
        for number in range(2, args.orchestrators + 1):
            another = further_orchestrator(stack, f"orchestrator {number}")
            addresses.append(await exits.enter_async_context(another))
        clients = [await exits.enter_async_context(Client(address)) for address in addresses]
        return await stack.guard(_measure(args, clients))


async def _measure(args: argparse.Namespace, clients: Sequence[Client]) -> SharingReport:
    prompts = [to_request(p, None) for p in fresh_problems(PROMPTS, args.seed).prompts]
    options = GenerateOptions(
        max_tokens=args.max_tokens,
        ignore_eos=True,
        rule=Rule(args.rule),
        num_speculative_tokens=args.num_speculative_tokens,
    )
    alone = Load(clients[0], prompts, options, args.seed)
    await alone.closed(args.max_sessions, args.warm_up)
    closed = await alone.closed(args.max_sessions, args.calibrate)
    sustainable = args.max_sessions / (sum(closed.latencies()) / max(1, closed.count("complete")))
    rate = args.factor * sustainable
    one = SharingPhase.of(1, rate, await alone.open(rate, args.seconds))
    several = Load(clients, prompts, options, args.seed + 1)
    many = SharingPhase.of(len(clients), rate, await several.open(rate, args.seconds))
    return SharingReport(args.max_sessions, sustainable, one, many)


def parser() -> argparse.ArgumentParser:
    """The flags."""
    found = command.parser("sharing", __doc__)
    found.add_argument("--orchestrators", type=int, default=2, help="over the same services")
    found.add_argument("--seconds", type=float, default=120.0, help="of load, twice")
    found.add_argument("--factor", type=float, default=1.5, help="of the sustainable rate")
    found.add_argument("--calibrate", type=float, default=30.0, help="seconds at capacity")
    found.add_argument("--warm-up", type=float, default=10.0, help="seconds before all that")
    found.add_argument("--max-tokens", type=int, default=160, help="of an output, on average")
    found.add_argument("--rule", default="exact", help="acceptance rule of the requests")
    found.add_argument("--num-speculative-tokens", type=int, default=8, help="K")
    found.add_argument("--max-sessions", type=int, default=4, help="slots of each service")
    found.add_argument("--seed", type=int, default=0)
    return found


def table(report: SharingReport) -> Table:
    """A row for one orchestrator, and one for several."""
    columns = ("orchestrators", "req/s", "sent", "completed", "refused", "failed",
               "first token p50", "p99", "refusal p99", "overtaken by at most")  # fmt: skip
    rows = [
        (
            str(p.orchestrators), f"{p.rate:.2f}", str(p.sent), str(p.completed), str(p.refused),
            str(p.failed), f"{p.first_token_p50_s:.2f} s", f"{p.first_token_p99_s:.2f} s",
            f"{1e3 * p.refusal_p99_s:.0f} ms", f"{p.overtaken_s:.2f} s",
        )
        for p in (report.alone, report.several)
    ]  # fmt: skip
    title = f"{report.slots} slots, sustainable: {report.sustainable_rate:.2f} req/s"
    return make_table(columns, rows, title)


def show(report: SharingReport) -> None:
    """The report for people."""
    console = result_console()
    console.print(table(report))
    broken = report.broken()
    lines = [f"p99 time to first token: {report.ratio:.2f} times that with one orchestrator"]
    lines += [f"BROKEN: {why}" for why in broken] or ["PASSED"]
    console.print("\n".join(lines), markup=False)


def main() -> int:
    """Run it; the exit code."""
    args = parser().parse_args()
    return command.run(
        args, lambda: asyncio.run(measure(args)), SharingReport.to_document, show,
        lambda r: not r.broken(),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
