"""`flyspec bench`: the speed of decoding modes, and the parts of a round."""

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
from flyspec_lab.bench.options import SpeedOptions
from flyspec_lab.commands import Address
from flyspec_lab.commands.bench.round import bench_round
from flyspec_lab.report import Report, Results

_LEAST_SESSIONS = 4


app = typer.Typer(invoke_without_command=True)
app.command("round")(bench_round)


@app.callback()
@with_flags
def bench(
    context: typer.Context,
    models: ModelFlags,
    connection: Credentials,
    options: SpeedOptions,
    results: Results,
    address: Address = None,
) -> None:
    """Compare the speed of plain decoding, acceptance rules and others, interleaved by prompt."""
    if context.invoked_subcommand:
        sources = map(context.get_parameter_source, context.params)
        if any(source and source.name == "COMMANDLINE" for source in sources):
            raise typer.BadParameter(f"put flags behind `{context.invoked_subcommand}`")
        return
    from flyspec.cli.runtime import refuse_model_flags, run_async, with_server
    from flyspec_lab.bench.prompts import groups_of
    from flyspec_lab.commands.bench.comparison import compare

    o, groups = options, groups_of(options)
    refuse_model_flags(models, address is None, address, reads_model=True)
    if o.temperature and (o.peers or o.against):
        raise ConfigError("--peers and --against are timed greedily; remove --temperature")
    if o.makes_pair and address is not None:
        raise ConfigError("--shape and --pad-target-layers make a pair to start; remove --address")

    def measure() -> Report:
        stack: StackOptions | None = None
        facts: dict[str, Any] = {"model": models.model}
        with tempfile.TemporaryDirectory(prefix="flyspec-pair-") as folder:
            if address is None:  # with few slots, so that noise soon fills the caches
                largest = max(o.batch)
                slots = max(_LEAST_SESSIONS, largest + largest // 4)
                stack = StackOptions(**vars(models), log_level="warning", max_sessions=slots)
            if stack and o.makes_pair:
                stack, facts = _with_made_pair(stack.resolved(), o, Path(folder))
            use = partial(compare, o, groups, facts)
            return run_async(with_server(stack, address, use, connection))

    results.of(measure)


def _with_made_pair(
    stack: StackOptions, o: SpeedOptions, folder: Path
) -> tuple[StackOptions, dict[str, Any]]:
    """Return the stack with the requested pair, written into `folder`, and facts about it.

    Raises `ConfigError`.
    """
    from transformers.utils.logging import disable_progress_bar

    from flyspec.engine.loading import resolve_device
    from flyspec.progress import working
    from flyspec_lab.bench.shapes import SHAPES, draft_layers, pad_layers, write_pair

    disable_progress_bar()
    pair = Path(str(stack.model)).name
    if o.shape:
        pair = f"random {o.shape}, {draft_layers(o.shape)} of its layers as the draft model"
        tokenizer, device = Path(stack.model or TARGET), resolve_device(stack.device)
        with working(f"writing random weights of shape {o.shape}"):
            model, draft = write_pair(o.shape, folder, tokenizer, device)
        stack = replace(stack, model=str(model), draft_model=str(draft))
        stack = replace(stack, autojudge_file=None, heads=None)
    if o.pad_target_layers:
        padded = pad_layers(Path(str(stack.model)), folder / "padded", o.pad_target_layers)
        stack = replace(stack, model=str(padded))
        pair += f", {o.pad_target_layers} extra layers in the target"
    return stack, {"pair": pair, "shape": SHAPES.get(o.shape)}
