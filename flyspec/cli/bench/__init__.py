"""`flyspec bench`: how fast, as `flyspec.bench.speed` measures; each subcommand is a module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyspec.cli.bench.engine import bench_engine
from flyspec.cli.bench.judge import bench_judge
from flyspec.cli.bench.stall import bench_stall
from flyspec.cli.bench.throughput import bench_throughput
from flyspec.cli.options import ModelFlags, measuring, with_flags
from flyspec.cli.stack import Stack, StackOptions
from flyspec.credentials import Credentials
from flyspec.flags import Flag

if TYPE_CHECKING:
    from flyspec.client import Client

app = typer.Typer(invoke_without_command=True)
app.command("judge")(bench_judge)
app.command("engine")(bench_engine)
app.command("throughput")(bench_throughput)
app.command("prefill-stall")(bench_stall)


@app.callback()
@with_flags
def bench(
    context: typer.Context,
    models: ModelFlags,
    connection: Credentials,
    prompt_file: measuring.PromptFiles = (),
    problems: Annotated[
        int | None,
        Flag("Number of fresh word problems.", min=0, default="20 if no --prompt-file is given"),
    ] = None,
    problem_seed: measuring.ProblemSeed = 7,
    limit: measuring.Limit = None,
    address: measuring.Address = None,
    local: measuring.Local = False,
    rules: Annotated[
        str,
        Flag("Rules to measure, with commas and parameters as in "
             "exact,margin:margin_threshold=0.2,fly_window_size=4."),
    ] = "exact,fly",
    drafter: measuring.Drafter = "",
    num_speculative_tokens: measuring.K = 15,
    max_tokens: measuring.MaxTokens = 128,
    ignore_eos: measuring.IgnoreEos = False,
    repeats: Annotated[int, Flag("Runs of each prompt and mode.", min=1)] = 3,
    chat: measuring.Chat = None,
    reference: Annotated[bool, Flag("Also time transformers' greedy generate.")] = False,
    json: measuring.Json = False,
    output: measuring.Output = None,
) -> None:  # fmt: skip
    """Compare plain decoding, acceptance rules and transformers, prompt by prompt in turn."""
    if context.invoked_subcommand is not None:
        _refuse_flags_before_command(context)
        return
    from flyspec.bench.conditions import parse_conditions
    from flyspec.bench.prompts import groups as read_groups
    from flyspec.bench.speed import SpeedOptions, count, measure, report, to_document
    from flyspec.bench.transport import round_trips_ns
    from flyspec.cli.runtime import (
        check_output,
        print_json,
        refuse_model_flags,
        run_async,
        with_server,
        write_json,
    )

    check_output(output)
    refuse_model_flags(models, local or address is None, address)
    groups = read_groups(prompt_file, problems, problem_seed, limit)
    options = SpeedOptions(
        conditions=parse_conditions(rules),
        num_speculative_tokens=num_speculative_tokens,
        max_tokens=max_tokens,
        repeats=repeats,
        drafter=drafter,
        chat=chat,
        ignore_eos=ignore_eos,
    )

    async def use(client: Client, stack: Stack | None) -> dict[str, Any]:
        from flyspec.cli.progress import progress_bar
        from flyspec.cli.runtime import error_console

        target = (await client.list_models()).target
        threads = stack.options.threads if stack else models.threads
        baseline = None
        if reference:
            from flyspec.bench.reference import Reference

            baseline = Reference(target.name, target.dtype, threads, target.device)
        console = error_console()
        total = count(groups, options, reference)
        console.print(f"measuring {total} generations on {target.name}", markup=False)
        with progress_bar(console) as progress:
            bar = progress.add_task("measuring", total=total)
            samples = await measure(
                client, groups, options, baseline, lambda: progress.advance(bar)
            )
        reports = report(samples)
        bare_ms = await round_trips_ns() / 1e6
        facts = {
            "target": target.name,
            "dtype": target.dtype,
            "device": target.device,
            "threads": threads or None,
            "draft_model": stack.options.draft_model if stack else None,
            "num_speculative_tokens": num_speculative_tokens,
            "max_tokens": max_tokens,
            "repeats": repeats,
            "grpc_round_trips_p50_ms": bare_ms,
        }
        document = to_document(reports, **facts)
        write_json(output, {**document, "samples": [vars(s) for s in samples]})
        if not json:
            _print(reports, bare_ms)
        return document

    stack_options = StackOptions(**vars(models), log_level="warning") if address is None else None
    document = run_async(with_server(stack_options, address, use, connection))
    if json:
        print_json(document)


def _refuse_flags_before_command(context: typer.Context) -> None:
    """Flags of `bench` say nothing to its subcommands."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(
                f"--{name.replace('_', '-')} is a flag of `flyspec bench` itself; "
                f"give flags of `{context.invoked_subcommand}` after its name"
            )


def _print(reports: dict[str, Any], bare_ms: float) -> None:
    from rich.console import Console

    from flyspec.bench.tables import SPEED_NOTES, speed_table

    console = Console(highlight=False)
    for name, of in reports.items():
        console.print(speed_table(name, of))
    console.print(SPEED_NOTES, style="dim")
    console.print(
        f"Two bare gRPC round trips with a model's work between them take {bare_ms:.2f} ms here, "
        "and every round makes them.",
        style="dim",
    )
