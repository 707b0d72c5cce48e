"""Progress on standard error: bars and seconds on a terminal, now and then a line elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

LINE_EVERY_S = 10.0
"""Seconds between lines that are not on a terminal."""


def error_console() -> Console:
    """Return a console on standard error, for everything but results."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


class Bar(Progress):
    """A bar that disappears when done and leaves standard output alone; lines if it is disabled."""

    def __init__(self, console: Console) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            redirect_stdout=False,
            redirect_stderr=False,
            transient=True,
        )
        self._began = self._told = perf_counter()

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        now = perf_counter()
        if not self.disable or now - self._told < LINE_EVERY_S:
            return
        self._told = now
        task, elapsed_s = self._tasks[task_id], now - self._began
        if task.total:
            rest_s = elapsed_s * (task.total - task.completed) / task.completed
            self.console.print(
                f"{task.description}: {task.completed:.0f} of {task.total:.0f}, "
                f"{elapsed_s:.1f} s, about {rest_s:.0f} s left", markup=False,
            )  # fmt: skip


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[..., None]]:
    """Show a bar while the context is open; yield the function to call after each of its steps.

    It may be told how many steps were made.
    """
    with Bar(error_console()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count=1: bar.advance(task, count)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show what is being done while the context is open, with its seconds; elsewhere a line."""
    console = error_console()
    if not console.is_terminal:
        console.print(what, markup=False)
        yield
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as shown:
        shown.add_task(what, total=None)
        yield
