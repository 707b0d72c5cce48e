"""`flyspec bench`, and its subcommands."""

from __future__ import annotations

import typer

from flyspec.cli.options import ModelFlags, with_flags
from flyspec.cli.stack_options import StackOptions
from flyspec.credentials import Credentials
from flyspec_lab.bench.options import SpeedOptions
from flyspec_lab.commands.bench.common import Address, Local
from flyspec_lab.commands.bench.device import bench_device
from flyspec_lab.commands.bench.engine import (
    bench_engine,
    bench_judge,
    bench_stall,
    bench_throughput,
)
from flyspec_lab.commands.bench.pair import bench_pair
from flyspec_lab.commands.bench.prediction import bench_prediction
from flyspec_lab.commands.bench.round import bench_round
from flyspec_lab.commands.bench.startup import bench_startup
from flyspec_lab.report import Results

app = typer.Typer(invoke_without_command=True)
app.command("judge")(bench_judge)
app.command("engine")(bench_engine)
app.command("device")(bench_device)
app.command("throughput")(bench_throughput)
app.command("prefill-stall")(bench_stall)
app.command("pair")(bench_pair)
app.command("round")(bench_round)
app.command("prediction")(bench_prediction)
app.command("startup")(bench_startup)

_LEAST_SESSIONS = 4


@app.callback()
@with_flags
def bench(
    context: typer.Context,
    models: ModelFlags,
    connection: Credentials,
    options: SpeedOptions,
    results: Results,
    address: Address = None,
    local: Local = False,
) -> None:
    """Compare the speed of plain decoding, acceptance rules and others, interleaved by prompt."""
    if context.invoked_subcommand is not None:
        _refuse_flags_before_command(context)
        return
    from flyspec.cli.runtime import refuse_model_flags, run_async, with_server
    from flyspec.errors import ConfigError
    from flyspec_lab.bench.prompts import groups as read_groups
    from flyspec_lab.commands.bench.comparison import compare

    local = local or address is None
    refuse_model_flags(models, local, address, reads_model=True)
    if options.compare_dtypes and not local:
        raise ConfigError("--compare-dtypes starts its own stacks; remove --address")
    if options.temperature and options.others:
        raise ConfigError("--peers and --against are timed greedily; remove --temperature")
    files, problems = options.prompt_file, options.problems
    if problems is None and options.random_prompts and not files:
        problems = 0
    groups = read_groups(files, problems, options.problem_seed, options.limit)
    stack = None
    if local:  # with few slots, so that noise soon fills the caches
        largest = max(options.batch)
        slots = max(_LEAST_SESSIONS, largest + largest // 4)
        stack = StackOptions(**vars(models), log_level="warning", max_sessions=slots)
    results.of(lambda: run_async(with_server(
        stack, address, lambda *servers: compare(options, groups, models.model, *servers),
        connection,
    )))  # fmt: skip


def _refuse_flags_before_command(context: typer.Context) -> None:
    """Refuse flags of `bench` before a subcommand, which would ignore them."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(
                f"--{name.replace('_', '-')} is a flag of `flyspec bench` itself; "
                f"put flags of `{context.invoked_subcommand}` after its name"
            )
