"""`flyspec bench`: how fast. Measures in `bench.speed`; `bench judge` in `bench.judging`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flyspec.cli.options import ModelFlags, with_flags
from flyspec.errors import ConfigError

if TYPE_CHECKING:
    from bench.judging import JudgeReport
    from flyspec.cli.stack import Stack
    from flyspec.client import Client

app = typer.Typer(invoke_without_command=True)

_PIPED_WIDTH = 132  # of a table that no terminal shows


@app.callback()
@with_flags
def bench(
    context: typer.Context,
    models: ModelFlags,
    prompt_file: Annotated[
        list[str] | None,
        typer.Option(help="Lines, HumanEval, GSM8K, Spec-Bench or MGSM; repeatable."),
    ] = None,
    problems: Annotated[
        int | None,
        typer.Option(
            help="Fresh word problems.", min=0, show_default="20 if no --prompt-file is given"
        ),
    ] = None,
    problem_seed: Annotated[int, typer.Option(help="Seed of the word problems.")] = 7,
    limit: Annotated[int | None, typer.Option(help="Most prompts of a file.", min=1)] = None,
    address: Annotated[
        str | None,
        typer.Option(help="Of a running stack.", show_default="one is started for this command"),
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="Start a stack (the default).")] = False,
    rules: Annotated[
        str,
        typer.Option(
            help="Rules to measure, with commas and parameters as in "
            "exact,margin:margin_threshold=0.2,fly_window_size=4."
        ),
    ] = "exact,fly",
    drafter: Annotated[
        str, typer.Option(help="Drafter to measure.", show_default="the server's")
    ] = "",
    num_speculative_tokens: Annotated[int, typer.Option(help="K.", min=1)] = 15,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an output.", min=1)] = 128,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Outputs of max-tokens, whatever is in them.")
    ] = False,
    repeats: Annotated[int, typer.Option(help="Runs of every prompt and mode.", min=1)] = 3,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Ask an assistant.",
            show_default="questions are asked, code is continued",
        ),
    ] = None,
    reference: Annotated[
        bool, typer.Option("--reference", help="Time transformers' greedy generate as well.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON document, no table.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="Also write the JSON document, with all samples, here.")
    ] = None,
) -> None:
    """Compare plain decoding, acceptance rules and transformers, prompt by prompt in turn."""
    if context.invoked_subcommand is not None:
        _refuse_flags_before_command(context)
        return
    from bench.conditions import parse_conditions
    from bench.prompts import groups as read_groups
    from bench.speed import SpeedOptions, count, measure, report, to_document
    from bench.transport import round_trip_ns
    from flyspec.cli.runtime import (
        print_json,
        refuse_model_flags,
        run_async,
        to_json,
        with_server,
    )

    refuse_model_flags(models, local or address is None, address)
    groups = read_groups(prompt_file or [], problems, problem_seed, limit)
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
            from bench.reference import Reference

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
        bare_ms = await round_trip_ns() / 1e6
        facts = {
            "target": target.name,
            "dtype": target.dtype,
            "device": target.device,
            "threads": threads or None,
            "draft_model": stack.options.draft_model if stack else None,
            "num_speculative_tokens": num_speculative_tokens,
            "max_tokens": max_tokens,
            "repeats": repeats,
            "grpc_round_trip_p50_ms": bare_ms,
        }
        document = to_document(reports, **facts)
        if output is not None:
            output.write_text(to_json({**document, "samples": [vars(s) for s in samples]}))
        if not json:
            _print(reports, bare_ms)
        return document

    stack_options = models.to_stack_options(log_level="warning") if address is None else None
    document = run_async(with_server(stack_options, address, use))
    if json:
        print_json(document)


@app.command("judge")
def bench_judge(
    vocab_size: Annotated[int, typer.Option(help="V.", min=64)] = 128_256,
    hidden_size: Annotated[int, typer.Option(help="Of the output layer.", min=1)] = 4096,
    num_speculative_tokens: Annotated[
        list[int] | None, typer.Option(help="K; repeatable.", min=1, show_default="15 and 25")
    ] = None,
    rules: Annotated[
        str | None,
        typer.Option(
            help="Rules to judge by, with commas and parameters as in `flyspec eval --rules`.",
            show_default="every preset",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Timed runs of everything.", min=1)] = 9,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N or auto.")] = "auto",
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option(help="Of layer and logits.")
    ] = "bfloat16",
    threads: Annotated[int, typer.Option(help="CPU threads.", min=0, show_default="all cores")] = 0,
    json: Annotated[bool, typer.Option("--json", help="One JSON document, no table.")] = False,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON document here.")] = None,
) -> None:
    """Time the judging of rounds against the forward of the target's output layer."""
    import torch

    from bench import judging
    from bench.conditions import parse_rules
    from flyspec.cli.progress import progress_bar
    from flyspec.cli.runtime import error_console, print_json, to_json
    from flyspec.engine.loading import resolve_device

    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no directory {output.parent}")
    if threads:
        torch.set_num_threads(threads)
    options = judging.JudgeOptions(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_speculative_tokens=tuple(dict.fromkeys(num_speculative_tokens or (15, 25))),
        rules=judging.DEFAULT_RULES if rules is None else parse_rules(rules),
        dtype=getattr(torch, dtype),
        device=resolve_device(device),
        repeats=repeats,
    )
    console = error_console()
    with progress_bar(console) as progress:
        bar = progress.add_task("judging", total=judging.count(options))
        report = judging.measure(options, lambda: progress.advance(bar))
    document = report.to_document()
    if output is not None:
        output.write_text(to_json(document))
    if json:
        print_json(document)
    else:
        _print_judging(report)


def _refuse_flags_before_command(context: typer.Context) -> None:
    """Flags of `bench` say nothing to its subcommands."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(
                f"--{name.replace('_', '-')} is a flag of `flyspec bench` itself; "
                f"give flags of `{context.invoked_subcommand}` after its name"
            )


def _print_judging(report: JudgeReport) -> None:
    from rich.console import Console

    from bench.judging import TARGET_SHARE
    from bench.tables import judge_tables

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _PIPED_WIDTH)
    for layer in report.layers:
        console.print(
            f"output layer {report.hidden_size} -> {report.vocab_size:,}, {layer.rows} rows, "
            f"{report.dtype} on {report.device}: {layer.median_ns / 1e6:.2f} ms"
        )
    for table in judge_tables(report):
        console.print(table)
    worst = report.worst_share
    if worst is not None:
        verdict = "met" if worst <= TARGET_SHARE else "missed"
        console.print(
            f"target for greedy exact and fly: at most {TARGET_SHARE:.0%} of the layer's time; "
            f"{verdict}, the most is {worst:.1%}",
        )
    console.print(
        f"Medians of {report.repeats} runs, {report.threads} CPU threads; shares are of the "
        "layer's time just before. Mismatches: what became of the drafted token is said.",
        style="dim",
    )


def _print(reports: dict[str, Any], bare_ms: float) -> None:
    from rich.console import Console

    from bench.tables import SPEED_NOTES, speed_table

    console = Console(highlight=False)
    for name, of in reports.items():
        console.print(speed_table(name, of))
    console.print(SPEED_NOTES, style="dim")
    console.print(
        f"A bare gRPC stream's round trip takes {bare_ms:.2f} ms here; a round makes two.",
        style="dim",
    )
