"""What the subcommands of `flyspec bench` share: flags, lists of numbers, where results go."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flyspec.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

_PIPED_WIDTH = 132  # of a table that no terminal shows

ModelFlag = Annotated[
    str | None,
    typer.Option(
        "--model", help="A directory or hub id.", show_default="the bundled pair's target"
    ),
]
DeviceFlag = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:N or auto.")]
ThreadsFlag = Annotated[
    int, typer.Option("--threads", help="CPU threads.", min=0, show_default="all cores")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON document, no table.")]
OutputFlag = Annotated[
    Path | None, typer.Option("--output", help="Also write the JSON document here.")
]
PlotFlag = Annotated[
    Path | None,
    typer.Option("--plot", help="Draw a plot: a file .svg, .png or .pdf. Needs matplotlib."),
]


def default_model(model: str | None) -> str:
    """The model, or the bundled target. Raises `ConfigError` where there is none."""
    if model is not None:
        return model
    from flyspec.cli.stack import StackOptions

    return str(StackOptions().resolved().model)


def numbers(flag: str, text: str, least: int) -> tuple[int, ...]:
    """The whole numbers of a comma list, in increasing order, each once. Raises `ConfigError`."""
    try:
        found = sorted({int(piece) for piece in text.split(",") if piece.strip()})
    except ValueError:
        found = []
    if not found or found[0] < least:
        raise ConfigError(
            f"{flag} {text!r}: must be whole numbers of at least {least}, with commas between them"
        )
    return tuple(found)


def silence_loading() -> None:
    """No progress bar of transformers': it would come between ours and the results."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def result_console() -> Console:
    """Standard output, wide enough for tables where no terminal shows it."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _PIPED_WIDTH)
    return console
