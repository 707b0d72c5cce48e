"""Progress of a stack that starts: the current stage of each service, and its duration so far."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from time import perf_counter
from typing import TYPE_CHECKING

from flyspec.startup import READY

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from flyspec.cli.stack import OnStage, Stack

NAMES = {"verify": "verify service", "draft": "draft service", "orchestrator": "orchestrator"}


class StartProgress:
    """The stage of each service, with the seconds since the start of the stack when it began."""

    def __init__(self) -> None:
        self._began = perf_counter()
        self._stages: dict[str, tuple[str, float]] = {}

    @property
    def elapsed_s(self) -> float:
        return perf_counter() - self._began

    def stage(self, service: str, doing: str) -> None:
        self._stages[service] = doing, self.elapsed_s

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        for service, name in NAMES.items():
            doing, since = self._stages.get(service, ("", 0.0))
            known = doing not in ("", READY)
            table.add_row(name, doing, f"{self.elapsed_s - since:.1f} s" if known else "")
        table.add_row("starting", f"{self.elapsed_s:.1f} s", "", style="dim")
        return table


@contextmanager
def showing(stack: Stack, console: Console) -> Iterator[OnStage]:
    """Show a start on a console; yield what the stack calls with each stage.

    First the stack is checked, as a download has a bar of its own. On a terminal all services are
    shown while they start;
    elsewhere each stage is a line.
    """
    stack.check()
    start = StartProgress()
    if console.is_terminal:
        from rich.live import Live

        with Live(start, console=console, transient=True, refresh_per_second=8):
            yield start.stage
        return
    console.print(f"starting {stack.options.model}", markup=False)

    def report(service: str, doing: str) -> None:
        console.print(f"{start.elapsed_s:6.1f} s  {NAMES[service]}: {doing}", markup=False)

    yield report


@asynccontextmanager
async def shown(stack: Stack, console: Console) -> AsyncIterator[Stack]:
    """Run a stack while the context is open, and show its start."""
    with showing(stack, console) as stack.on_stage:
        await stack.__aenter__()
    try:
        yield stack
    finally:
        await stack.__aexit__()
