"""Does swapping drafters disturb anybody? `python -m bench.swap --json FILE`.

Streams run all the time, `exact`, greedy and sampled. Meanwhile three drafters take turns: the
bundled draft model, the same one behind prompt lookup (multi_level), and the byte-level one, whose
tokens are translated. Each turn registers the next drafter, gives it a share of the new
generations, activates it, drains the one before and removes it. Every text must be the one of an
undisturbed run, no call may fail, and the target must stay the process that it was, its model
loaded once.

Exits with 1 if any of that does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field

from bench import command
from bench.command import print_table
from demo.corpus import chat_prompt, problems
from flyspec.cli.stack import Stack, StackOptions
from flyspec.client import AdminClient, Client, DrafterStats, GenerateOptions
from flyspec.errors import FlyspecError
from flyspec.rules import Rule
from flyspec.values.generation import RecoveryKind
from flyspec.values.tokens import SamplingParams
from loadtest.bundled import DRAFTERS, further_drafter

EXACT = Rule("exact")
CANARY_SHARE = 0.2


@dataclass
class Swap:
    """A swap: how long each step took, ms, and how many generations it moved."""

    drafter: str
    probe_ms: float
    activate_ms: float
    drain_ms: float


@dataclass
class SwapReport:
    """What was seen. `moved` counts generations that were moved in mid-stream."""

    turns: list[Swap] = field(default_factory=list)
    streams: int = 0
    tokens: int = 0
    seconds: float = 0.0
    moved: int = 0
    longest_pause_ms: float = 0.0
    drafters: dict[str, dict[str, float]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class Swapping:
    """A run over a stack."""

    def __init__(self, args: argparse.Namespace, stack: Stack) -> None:
        self._args, self._stack = args, stack
        self.report = SwapReport()
        self._requests = [(chat_prompt(p.question), self._options(index))
                          for index, p in enumerate(problems("swap", args.texts))]  # fmt: skip
        self._expected: list[list[int]] = []
        self._running = True
        self._stats: dict[str, DrafterStats] = {}

    def _options(self, index: int) -> GenerateOptions:
        sampling = SamplingParams() if index % 2 else SamplingParams(temperature=0.8, top_p=0.95)
        return GenerateOptions(
            sampling=sampling,
            seed=index,
            rule=EXACT,
            max_tokens=self._args.max_tokens,
            ignore_eos=True,
            num_speculative_tokens=self._args.k,
        )

    async def run(self) -> SwapReport:
        """All of it."""
        report = self.report
        async with Client(self._stack.address) as client:
            self._expected = [
                (await client.complete(prompt, options)).token_ids
                for prompt, options in self._requests
            ]
            async with AdminClient(self._stack.admin_address) as admin:
                before = (await admin.status()).verify.process
                began = time.monotonic()
                streams = [
                    asyncio.create_task(self._stream(client, n)) for n in range(self._args.streams)
                ]
                try:
                    await self._swap(admin)
                except FlyspecError as error:
                    report.problems.append(f"the operator was told: {error}")
                self._running = False
                await asyncio.gather(*streams)
                report.seconds = time.monotonic() - began
                after = (await admin.status()).verify.process
                await self._note(admin)
        if (before.instance_id, before.process_id) != (after.instance_id, after.process_id):
            report.problems.append(f"the target was process {before}, it is {after}")
        if after.num_model_loads != before.num_model_loads:
            report.problems.append(f"the target loaded {after.num_model_loads} models")
        for name, stats in sorted(self._stats.items()):
            report.drafters[name] = {
                "rounds": stats.num_spec_steps,
                "draft_acceptance_rate": stats.draft_acceptance_rate,
                "mean_accepted_tokens": stats.mean_accepted_tokens,
                "mean_proposal_ms": stats.mean_proposal_ms,
                "failures": stats.failures_total,
            }
        return report

    async def _stream(self, client: Client, number: int) -> None:
        """One text after the other."""
        report, count = self.report, number
        while self._running:
            index = count % len(self._requests)
            count += self._args.streams - 1
            prompt, options = self._requests[index]
            try:
                generation = await client.complete(prompt, options)
            except FlyspecError as error:
                report.problems.append(f"text {index} failed: {error}")
                return
            report.streams += 1
            report.tokens += len(generation.token_ids)
            if generation.token_ids != self._expected[index]:
                report.problems.append(f"text {index} differs from the undisturbed one")
            for recovery in generation.completion.recoveries:
                if recovery.kind is RecoveryKind.DRAFTER_SWAPPED:
                    report.moved += 1
                    pause = recovery.delay_ns / 1e6
                    report.longest_pause_ms = max(report.longest_pause_ms, pause)

    async def _swap(self, admin: AdminClient) -> None:
        """The drafters take turns."""
        async with AsyncExitStack() as resources:
            addresses = {
                name: await further_drafter(resources, name, model, command.say)
                for name, model, _ in DRAFTERS
            }
            active = (await admin.list_drafters())[0].name
            for turn in range(self._args.turns):
                name, _, kind = DRAFTERS[turn % len(DRAFTERS)]
                _, probe_ns = await admin.register_drafter(name, addresses[name], kind)
                await admin.activate_drafter(name, CANARY_SHARE)
                await asyncio.sleep(self._args.hold / 2)
                began = time.perf_counter()
                await admin.activate_drafter(name)
                activated = time.perf_counter()
                drained = await admin.drain_drafter(active, 30.0)
                if drained.stats.active_generations:
                    self.report.problems.append(f"{active} did not drain")
                ended = time.perf_counter()
                await self._note(admin)
                await admin.remove_drafter(active)
                active = name
                self.report.turns.append(
                    Swap(name, probe_ns / 1e6, 1e3 * (activated - began), 1e3 * (ended - activated))
                )
                await asyncio.sleep(self._args.hold / 2)

    async def _note(self, admin: AdminClient) -> None:
        """Add up what each drafter did in each of its lives."""
        for drafter in await admin.list_drafters():
            kept = self._stats.get(drafter.name)
            if kept is None or drafter.stats.num_spec_steps > kept.num_spec_steps:
                self._stats[drafter.name] = drafter.stats


def show(report: SwapReport) -> None:
    """Print tables."""
    print_table(
        ("turn", "drafter", "trial", "activate", "drained after"),
        [
            (str(n), t.drafter, f"{t.probe_ms:.1f} ms", f"{t.activate_ms:.1f} ms",
             f"{t.drain_ms:.0f} ms")
            for n, t in enumerate(report.turns, 1)
        ],
    )  # fmt: skip
    print_table(
        ("drafter", "rounds", "accepted", "tokens a round", "proposal"),
        [
            (name, f"{d['rounds']:.0f}", f"{d['draft_acceptance_rate']:.0%}",
             f"{d['mean_accepted_tokens']:.2f}", f"{d['mean_proposal_ms']:.1f} ms")
            for name, d in report.drafters.items()
        ],
    )  # fmt: skip
    print(
        f"\n{report.streams} texts, {report.tokens} tokens in {report.seconds:.0f} s; "
        f"{report.moved} generations moved in mid-stream, the longest pause "
        f"{report.longest_pause_ms:.0f} ms"
    )
    for problem in report.problems:
        print(f"WRONG: {problem}")
    print("FAILED" if report.problems else "every text is the undisturbed one")


async def run(args: argparse.Namespace) -> SwapReport:
    """Start the bundled stack and swap."""
    options = StackOptions(
        dtype=args.dtype, log_level="warning", max_sessions=args.streams + 4, threads=1
    )
    async with Stack(options, on_log=command.say) as stack:
        return await stack.guard(Swapping(args, stack).run())


def main() -> int:
    """Swap and report."""
    parser = command.parser("swap", __doc__)
    parser.add_argument("--turns", type=int, default=10, help="swaps")
    parser.add_argument("--streams", type=int, default=16, help="generations at once")
    parser.add_argument("--texts", type=int, default=24, help="different requests")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--hold", type=float, default=4.0, help="seconds of a turn")
    parser.add_argument("--dtype", default="auto", help="the target's numbers")
    args = parser.parse_args()
    return command.run(
        args, lambda: asyncio.run(run(args)), asdict, show, lambda report: not report.problems
    )


if __name__ == "__main__":
    raise SystemExit(main())
