"""What the subcommands of `flyspec bench` share: lists of numbers, where results go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyspec.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

_PIPED_WIDTH = 132  # of a table that no terminal shows


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
