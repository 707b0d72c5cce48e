"""Progress bars on standard error, shown only on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def error_console() -> Console:
    """Return a console on standard error, for everything but results."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def progress_bar(console: Console) -> Progress:
    """Return a bar that disappears when done and leaves standard output alone."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        redirect_stdout=False,
        redirect_stderr=False,
        transient=True,
    )


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar while the context is open; yield the function to call after each of its steps."""
    with progress_bar(error_console()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
