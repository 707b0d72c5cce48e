"""`flyspec bench`: speed, as measured by `flyspec.bench.speed`; a module per subcommand."""

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
        Flag("Number of fresh word problems.", min=0, default="20, or 0 with other prompts"),
    ] = None,
    problem_seed: measuring.ProblemSeed = 7,
    random_prompts: Annotated[int, Flag(
        "Number of prompts of random tokens, which no drafter predicts well.", min=0,
    )] = 0,
    limit: Annotated[int | None, Flag(
        "Maximum prompts per file (or per category in it), evenly spaced.", min=1,
    )] = None,
    address: measuring.Address = None,
    local: measuring.Local = False,
    rules: Annotated[str, Flag(
        "Rules to measure: comma-separated, with parameters as in "
        "exact,margin:margin_threshold=0.2,fly_window_size=4.",
    )] = "exact,fly",
    drafter: Annotated[str, Flag(
        "Drafters to measure, comma-separated: model, prompt_lookup, multi_level or names of "
        "registered ones.", default="set by the server",
    )] = "",
    num_speculative_tokens: measuring.Ks = "auto",
    max_tokens: measuring.MaxTokens = 128,
    ignore_eos: measuring.IgnoreEos = False,
    repeats: Annotated[int, Flag("Runs per prompt and mode.", min=1)] = 5,
    chat: measuring.Chat = None,
    peers: Annotated[str, Flag(
        "Modes of transformers' generate to time too: greedy, assisted, prompt-lookup, ensemble "
        "(comma-separated), or all.", default="none",
    )] = "",
    against: Annotated[Sequence[str], Flag(
        "OpenAI-compatible server to time too: URL or NAME=URL; repeatable.",
    )] = (),
    batch: Annotated[str, Flag("Concurrent requests, comma-separated.")] = "1",
    compare_dtypes: Annotated[bool, Flag(
        "Also time plain decoding in the other of bfloat16 and float32.",
    )] = False,
    json: measuring.Json = False,
    output: measuring.Output = None,
) -> None:
    # fmt: on
    """Compare the speed of plain decoding, acceptance rules and others, interleaved by prompt."""
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
        raise ConfigError("--compare-dtypes starts its own stacks; remove --address")
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
    """Refuse flags of `bench` before a subcommand, which would ignore them."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(
                f"--{name.replace('_', '-')} is a flag of `flyspec bench` itself; "
                f"put flags of `{context.invoked_subcommand}` after its name"
            )
