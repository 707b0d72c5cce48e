"""`flyspec bench throughput`: the gain from concurrent requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyspec.bench.options import ThroughputOptions
from flyspec.cli.bench.common import PlottedResults, models_of
from flyspec.cli.options import ModelFlags, with_flags
from flyspec.cli.stack import Stack, StackOptions

if TYPE_CHECKING:
    from flyspec.bench.results import Report
    from flyspec.client import Client


@with_flags
def bench_throughput(
    models: ModelFlags, options: ThroughputOptions, results: PlottedResults
) -> None:
    """Compare concurrent requests with sequential ones, on a stack started by this command."""
    from flyspec.bench.engine.plots import plot_throughput
    from flyspec.bench.engine.tables import THROUGHPUT_NOTES, throughput_table
    from flyspec.bench.engine.throughput import measure, report
    from flyspec.bench.results import Report, notes
    from flyspec.cli.runtime import run_async, with_server
    from flyspec.client import AdminClient

    async def use(client: Client, stack: Stack | None) -> Report:
        assert stack is not None
        target = (await client.list_models()).target
        async with AdminClient(stack.admin_address) as admin:
            samples = await measure(client, admin, target.vocab_size, options)
        reports = report(samples)
        return Report(
            {**vars(options), **models_of(target, stack.options), "levels": reports},
            [throughput_table(reports), notes(THROUGHPUT_NOTES)],
            {"samples": samples},
            lambda path: plot_throughput(reports, path),
        )

    sessions = max(32, *options.concurrency)
    stack = StackOptions(**vars(models), log_level="warning", max_sessions=sessions)
    results.of(lambda: run_async(with_server(stack, None, use)))
