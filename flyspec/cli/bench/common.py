"""Shared by the subcommands of `flyspec bench`: lists of numbers, the result console."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyspec.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

_PIPED_WIDTH = 132  # of tables not shown on a terminal


def default_model(model: str | None) -> str:
    """Return the model, or the bundled target. Raises `ConfigError` if that is missing."""
    if model is not None:
        return model
    from flyspec.cli.stack import StackOptions

    return str(StackOptions().resolved().model)


def numbers(flag: str, text: str, least: int) -> tuple[int, ...]:
    """Return the distinct integers of a comma list in increasing order. Raises `ConfigError`."""
    try:
        found = sorted({int(piece) for piece in text.split(",") if piece.strip()})
    except ValueError:
        found = []
    if not found or found[0] < least:
        raise ConfigError(
            f"{flag} {text!r}: must be a comma-separated list of integers of at least {least}"
        )
    return tuple(found)


def silence_loading() -> None:
    """Turn off the progress bar of transformers, which would interfere with ours."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def result_console() -> Console:
    """Return a console on standard output, wide enough for tables if it is not a terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _PIPED_WIDTH)
    return console
