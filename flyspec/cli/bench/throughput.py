"""`flyspec bench throughput`: the gain from concurrent requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from flyspec.cli.bench.common import numbers, result_console
from flyspec.cli.options import ModelFlags, measuring, with_flags
from flyspec.cli.stack import Stack, StackOptions
from flyspec.errors import ConfigError
from flyspec.flags import Flag

if TYPE_CHECKING:
    from flyspec.client import Client


@with_flags
def bench_throughput(
    models: ModelFlags,
    concurrency: Annotated[str, Flag("Concurrent requests, comma-separated.")] = "1,2,4,8,16,32",
    rule: Annotated[
        str, Flag("Rule, with parameters as in margin:margin_threshold=0.2.")
    ] = "exact",
    drafter: measuring.Drafter = "",
    num_speculative_tokens: measuring.PlainOrK = 8,
    max_tokens: Annotated[int, Flag("Maximum output tokens.", min=2)] = 96,
    ignore_eos: measuring.IgnoreEos = False,
    problem_seed: measuring.ProblemSeed = 7,
    repeats: Annotated[int, Flag("Runs per concurrency and mode.", min=1)] = 3,
    json: measuring.Json = False,
    output: measuring.Output = None,
    plot: measuring.Plot = None,
) -> None:
    """Compare concurrent requests with sequential ones, on a stack started by this command."""
    from flyspec.bench.conditions import parse_conditions
    from flyspec.bench.engine.plots import plot_throughput
    from flyspec.bench.engine.throughput import (
        ThroughputOptions,
        count,
        measure,
        report,
        to_document,
    )
    from flyspec.cli.runtime import check_output, print_json, run_async, with_server, write_json

    check_output(output, plot)
    conditions = parse_conditions(rule)
    if len(conditions) > 1:
        raise ConfigError(f"--rule {rule!r} names {len(conditions)} rules; give one")
    if conditions[0].num_speculative_tokens is not None:
        raise ConfigError(f"--rule {rule!r} sets K; use --num-speculative-tokens instead")
    options = ThroughputOptions(
        concurrency=numbers("--concurrency", concurrency, 1),
        rule=conditions[0].rule,
        num_speculative_tokens=num_speculative_tokens,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        repeats=repeats,
        drafter=drafter,
        problem_seed=problem_seed,
    )
    sessions = max(32, *options.concurrency)

    async def use(client: Client, stack: Stack | None) -> dict[str, Any]:
        from flyspec.bench.engine.tables import THROUGHPUT_NOTES, throughput_table
        from flyspec.cli.progress import progress_bar
        from flyspec.cli.runtime import error_console
        from flyspec.client import AdminClient

        assert stack is not None
        target = (await client.list_models()).target
        with progress_bar(error_console()) as progress:
            bar = progress.add_task("measuring", total=count(options))
            async with AdminClient(stack.admin_address) as admin:
                samples = await measure(client, admin, options, lambda: progress.advance(bar))
        reports = report(samples)
        facts: dict[str, Any] = {
            "target": target.name,
            "dtype": target.dtype,
            "device": target.device,
            "threads": stack.options.threads,
            "draft_threads": stack.options.draft_threads,
            "tensor_parallel_size": stack.options.tensor_parallel_size,
            "draft_model": stack.options.draft_model,
            "rule": rule,
            "num_speculative_tokens": num_speculative_tokens,
            "max_tokens": max_tokens,
            "repeats": repeats,
        }
        document = to_document(reports, **facts)
        write_json(output, to_document(reports, samples, **facts))
        if plot is not None:
            plot_throughput(reports, plot)
        if not json:
            console = result_console()
            console.print(throughput_table(reports))
            console.print(THROUGHPUT_NOTES, style="dim")
        return document

    stack_options = StackOptions(**vars(models), log_level="warning", max_sessions=sessions)
    document = run_async(with_server(stack_options, None, use))
    if json:
        print_json(document)
