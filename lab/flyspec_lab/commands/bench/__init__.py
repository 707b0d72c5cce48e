"""`flyspec bench` and `flyspec bench pair`."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import typer

from flyspec.bundled import TARGET
from flyspec.cli.options import ModelFlags, with_flags
from flyspec.cli.stack_options import StackOptions
from flyspec.credentials import Credentials
from flyspec.errors import ConfigError
from flyspec_lab.bench.options import PairOptions, SpeedOptions
from flyspec_lab.commands import Address, Local
from flyspec_lab.report import Report, Results

app = typer.Typer(invoke_without_command=True)

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
    from flyspec_lab.bench.prompts import groups_of
    from flyspec_lab.commands.bench.comparison import compare

    o = options
    local = local or address is None
    refuse_model_flags(models, local, address, reads_model=True)
    if o.temperature and (o.peers or o.against):
        raise ConfigError("--peers and --against are timed greedily; remove --temperature")
    stack = None
    if local:  # with few slots, so that noise soon fills the caches
        largest = max(o.batch)
        slots = max(_LEAST_SESSIONS, largest + largest // 4)
        stack = StackOptions(**vars(models), log_level="warning", max_sessions=slots)
    use = partial(compare, o, groups_of(o), {"model": models.model})
    results.of(lambda: run_async(with_server(stack, address, use, connection)))


@app.command("pair")
@with_flags
def bench_pair(models: ModelFlags, options: PairOptions, results: Results) -> None:
    """Compare on other pairs of models: two directories, other shapes, a longer target."""
    from flyspec.cli.runtime import run_async, with_server
    from flyspec_lab.bench.prompts import groups_of
    from flyspec_lab.commands.bench.comparison import compare

    groups = groups_of(options)

    def measure() -> Report:
        with tempfile.TemporaryDirectory(prefix="flyspec-pair-") as folder:
            stack, facts = _prepare(models, options, Path(folder))
            return run_async(with_server(stack, None, partial(compare, options, groups, facts)))

    results.of(measure)


def _prepare(
    models: ModelFlags, o: PairOptions, folder: Path
) -> tuple[StackOptions, dict[str, Any]]:
    """Return options of the requested pair, with checkpoints in `folder`, and facts about it.

    Raises `ConfigError`.
    """
    from transformers.utils.logging import disable_progress_bar

    from flyspec.engine.loading import resolve_device
    from flyspec.progress import working
    from flyspec_lab.bench.shapes import SHAPES, config_of, draft_layers, pad_layers, write_pair

    disable_progress_bar()
    if o.shape:
        config_of(o.shape)  # before anything is loaded
    stack = StackOptions(
        **vars(models), log_level="warning", max_sessions=_LEAST_SESSIONS
    ).resolved()
    target = Path(str(stack.model)).name
    if o.shape:
        target = f"random {o.shape}, {draft_layers(o.shape)} of its layers as the draft model"
        tokenizer, device = Path(models.model or TARGET), resolve_device(models.device)
        with working(f"writing random weights of shape {o.shape}"):
            model, draft = write_pair(o.shape, folder, tokenizer, device)
        stack = replace(stack, model=str(model), draft_model=str(draft))
        stack = replace(stack, autojudge_file=None, heads=None)
    if o.pad_target_layers:
        padded = pad_layers(Path(str(stack.model)), folder / "padded", o.pad_target_layers)
        stack = replace(stack, model=str(padded))
        target += f", {o.pad_target_layers} extra layers in the target"
    return stack, {"target": target, "shape": SHAPES.get(o.shape)}


def _refuse_flags_before_command(context: typer.Context) -> None:
    """Refuse flags of `bench` before a subcommand, which would ignore them."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(
                f"--{name.replace('_', '-')} is a flag of `flyspec bench` itself; "
                f"put flags of `{context.invoked_subcommand}` after its name"
            )
