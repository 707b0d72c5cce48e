"""`flyspec bench`: how fast, as `flyspec.bench.speed` measures; each subcommand is a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from flyspec.cli.bench.engine import bench_engine
from flyspec.cli.bench.judge import bench_judge
from flyspec.cli.bench.pair import bench_pair
from flyspec.cli.bench.round import bench_round
from flyspec.cli.bench.stall import bench_stall
from flyspec.cli.bench.throughput import bench_throughput
from flyspec.cli.options import ModelFlags, measuring, with_flags
from flyspec.cli.stack import StackOptions
from flyspec.credentials import Credentials
from flyspec.flags import Flag

app = typer.Typer(invoke_without_command=True)
app.command("judge")(bench_judge)
app.command("engine")(bench_engine)
app.command("throughput")(bench_throughput)
app.command("prefill-stall")(bench_stall)
app.command("pair")(bench_pair)
app.command("round")(bench_round)


# fmt: off
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
    random_prompts: Annotated[int, Flag(
        "Number of prompts of random tokens, which nothing can draft well for.", min=0,
    )] = 0,
    limit: Annotated[int | None, Flag(
        "Maximum prompts per file, or category of one, evenly spread.", min=1,
    )] = None,
    address: measuring.Address = None,
    local: measuring.Local = False,
    rules: Annotated[str, Flag(
        "Rules to measure, with commas and parameters as in "
        "exact,margin:margin_threshold=0.2,fly_window_size=4.",
    )] = "exact,fly",
    drafter: Annotated[str, Flag(
        "Drafter: model, prompt_lookup, multi_level or one registered by name; several with "
        "commas are measured each.", default="the server's",
    )] = "",
    num_speculative_tokens: measuring.Ks = "auto",
    max_tokens: measuring.MaxTokens = 128,
    ignore_eos: measuring.IgnoreEos = False,
    repeats: Annotated[int, Flag("Runs of each prompt and mode.", min=1)] = 5,
    chat: measuring.Chat = None,
    peers: Annotated[str, Flag(
        "Ways of transformers' generate to time as well: greedy, assisted, prompt-lookup, "
        "ensemble, or all.", default="none",
    )] = "",
    against: Annotated[Sequence[str], Flag(
        "An OpenAI-compatible server to time as well: URL or NAME=URL; repeatable.",
    )] = (),
    batch: Annotated[str, Flag("Requests at once, several numbers with commas.")] = "1",
    compare_dtypes: Annotated[bool, Flag(
        "Also decode plainly in the other of bfloat16 and float32.",
    )] = False,
    json: measuring.Json = False,
    output: measuring.Output = None,
) -> None:
    # fmt: on
    """Compare plain decoding, acceptance rules and others, prompt by prompt in turn."""
    if context.invoked_subcommand is not None:
        _refuse_flags_before_command(context)
        return
    from flyspec.bench.conditions import parse_conditions, parse_ks
    from flyspec.bench.openai import parse_against
    from flyspec.bench.peers import parse_peers
    from flyspec.bench.prompts import groups as read_groups
    from flyspec.bench.speed import SpeedOptions
    from flyspec.cli.bench.common import numbers, result_console
    from flyspec.cli.bench.comparison import Comparison
    from flyspec.cli.runtime import (
        check_output,
        print_json,
        refuse_model_flags,
        run_async,
        with_server,
        write_json,
    )
    from flyspec.errors import ConfigError

    check_output(output)
    local = local or address is None
    refuse_model_flags(models, local, address, reads_model=True)
    if compare_dtypes and not local:
        raise ConfigError("--compare-dtypes starts stacks of its own; leave --address out")
    if problems is None and random_prompts and not prompt_file:
        problems = 0
    comparison = Comparison(
        options=SpeedOptions(
            conditions=parse_conditions(rules),
            num_speculative_tokens=parse_ks(num_speculative_tokens),
            max_tokens=max_tokens,
            repeats=repeats,
            drafters=tuple(name.strip() for name in drafter.split(",")),
            chat=chat,
            ignore_eos=ignore_eos,
        ),
        groups=read_groups(prompt_file, problems, problem_seed, limit),
        model=models.model or "",
        random_prompts=random_prompts,
        seed=problem_seed,
        peers=parse_peers(peers),
        against=[parse_against(text) for text in against],
        batches=numbers("--batch", batch, 1),
        compare_dtypes=compare_dtypes,
    )
    stack_options = None
    if local:
        stack_options = StackOptions(
            **vars(models), log_level="warning", max_sessions=comparison.max_sessions
        )
    document = run_async(with_server(stack_options, address, comparison.run, connection))
    write_json(output, document)
    if json:
        print_json({name: value for name, value in document.items() if "samples" not in name})
    else:
        comparison.show(result_console())


def _refuse_flags_before_command(context: typer.Context) -> None:
    """Flags of `bench` say nothing to its subcommands."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(
                f"--{name.replace('_', '-')} is a flag of `flyspec bench` itself; "
                f"give flags of `{context.invoked_subcommand}` after its name"
            )
