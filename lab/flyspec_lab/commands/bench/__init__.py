"""`flyspec bench`, and its subcommands."""

from __future__ import annotations

import typer

from flyspec.cli.options import ModelFlags, with_flags
from flyspec.cli.stack_options import StackOptions
from flyspec.credentials import Credentials
from flyspec_lab.bench.options import SpeedOptions
from flyspec_lab.commands.bench.common import Address, Local
from flyspec_lab.commands.bench.device import bench_device
from flyspec_lab.commands.bench.pair import bench_pair
from flyspec_lab.report import Results

app = typer.Typer(invoke_without_command=True)
app.command("device")(bench_device)
app.command("pair")(bench_pair)

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

    o = options
    local = local or address is None
    refuse_model_flags(models, local, address, reads_model=True)
    if o.temperature and (o.peers or o.against or o.llama_server):
        raise ConfigError(
            "--peers, --against and --llama-server are timed greedily; remove --temperature"
        )
    problems = 0 if o.problems is None and o.random_prompts and not o.prompt_file else o.problems
    groups = read_groups(o.prompt_file, problems, o.problem_seed, o.limit)
    stack = None
    if local:  # with few slots, so that noise soon fills the caches
        largest = max(o.batch)
        slots = max(_LEAST_SESSIONS, largest + largest // 4)
        stack = StackOptions(**vars(models), log_level="warning", max_sessions=slots)
    results.of(lambda: run_async(with_server(
        stack, address, lambda *servers: compare(o, groups, models.model, *servers), connection,
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
