"""`flyspec bench engine`, `prefill-stall`, `throughput` and `judge`: the verify service's parts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flyspec.cli.options import ModelFlags, with_flags
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.concurrency import whatever_reached
from flyspec_lab.bench.options import EngineOptions, JudgeOptions, StallOptions, ThroughputOptions
from flyspec_lab.commands.bench.common import models_of
from flyspec_lab.report import Part, PlottedResults, Report, Results

if TYPE_CHECKING:
    from flyspec.client import AsyncClient
    from flyspec_lab.bench.engine.stall_report import StallReport
    from flyspec_lab.bench.engine.steps_report import EngineReport


@with_flags
def bench_engine(options: EngineOptions, results: PlottedResults) -> None:
    """Time steps by batch, K and context, prefill and attention; report the memory of a slot."""
    from flyspec_lab.bench.engine.plots import plot_engine
    from flyspec_lab.bench.engine.steps import measure
    from flyspec_lab.bench.engine.tables import engine_shown

    def shown(found: EngineReport) -> Report:
        return Report(vars(found), [*engine_shown(found), plot_engine(found)])

    o = replace(options, model=options.model or _bundled_target())
    results.of(lambda: whatever_reached(lambda: measure(o), shown))


@with_flags
def bench_stall(options: StallOptions, results: PlottedResults) -> None:
    """Time decoding steps while a long prompt arrives, with and without chunked prefill."""
    from flyspec.cli.runtime import run_async
    from flyspec_lab.bench.engine.plots import plot_stall
    from flyspec_lab.bench.engine.stall import measure
    from flyspec_lab.bench.engine.tables import stall_summary, stall_table

    def shown(found: StallReport) -> Report:
        return Report(vars(found), [stall_table(found), stall_summary(found), plot_stall(found)])

    o = replace(options, model=options.model or _bundled_target())
    results.of(lambda: whatever_reached(lambda: run_async(measure(o)), shown))


def _bundled_target() -> str:
    """Return the path of the bundled target. Raises `ConfigError` if it is missing."""
    return str(StackOptions().resolved().model)


@with_flags
def bench_throughput(
    models: ModelFlags, options: ThroughputOptions, results: PlottedResults
) -> None:
    """Compare concurrent requests with sequential ones, on a stack started by this command."""
    from flyspec.cli.runtime import run_async, with_server
    from flyspec.client import AdminClient
    from flyspec_lab.bench.engine.plots import plot_throughput
    from flyspec_lab.bench.engine.tables import THROUGHPUT_NOTES, throughput_table
    from flyspec_lab.bench.engine.throughput import measure, report

    async def use(client: AsyncClient, stack: Stack | None) -> Report:
        assert stack is not None
        target = (await client.list_models()).target
        async with AdminClient(stack.admin_address) as admin:
            samples = await measure(client, admin, target.vocab_size, options)
        found = report(samples)
        return Report(
            {**vars(options), **models_of(target, stack), "levels": found},
            [throughput_table(found), THROUGHPUT_NOTES, plot_throughput(found)],
            {"samples": samples},
        )

    sessions = max(32, *options.concurrency)
    stack = StackOptions(**vars(models), log_level="warning", max_sessions=sessions)
    results.of(lambda: run_async(with_server(stack, None, use)))


@with_flags
def bench_judge(options: JudgeOptions, results: Results) -> None:
    """Compare the time to judge a round with the forward pass of the target's output layer."""
    from flyspec_lab.bench import judging

    def report(found: judging.JudgeReport) -> Report:
        goal = {"target_share": judging.TARGET_SHARE, "worst_share": found.worst_share}
        shown: list[Part] = [
            *judging.judge_tables(found),
            judging.judge_summary(found),
            f"Medians of {found.repeats} runs, {found.threads} CPU threads; shares are relative to "
            "the layer's time measured just before. After a mismatch: what became of the draft.",
        ]
        return Report({**vars(found), **goal}, shown)

    results.of(lambda: whatever_reached(lambda: judging.measure(options), report))
