"""Progress of a stack that starts: what each service is doing, since when, and the time left.

The time left is what the same start took the last time on this machine; unknown the first time.
"""

from __future__ import annotations

import platform
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import fields
from time import perf_counter
from typing import TYPE_CHECKING, Any

from flyspec.cli.options import ModelFlags
from flyspec.progress import left
from flyspec.remembered import recall, remember
from flyspec.startup import READY

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from flyspec.cli.stack import OnStage, Stack
    from flyspec.cli.stack_options import StackOptions

NAMES = {"verify": "verify service", "draft": "draft service", "orchestrator": "orchestrator"}
_LAST = "orchestrator"
_KIND = "starts"

Stages = dict[str, list[tuple[str, float]]]
"""Each service's stages, with the seconds since the start of the stack when each began."""


class StartProgress:
    """The stages of a start so far, and those of the last start alike."""

    def __init__(self, last: Stages | None, clock: Callable[[], float] = perf_counter) -> None:
        self.stages: Stages = {}
        self.last = last
        self._clock = clock
        self._began = clock()

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._began

    def stage(self, service: str, doing: str) -> None:
        self.stages.setdefault(service, []).append((doing, self.elapsed_s))

    @property
    def last_s(self) -> float | None:
        """Seconds that the last start took."""
        return self.last[_LAST][-1][1] if self.last else None

    def left_s(self) -> float | None:
        """Return the seconds left, judged by where the last start was at these stages."""
        if not self.last:
            return None
        try:
            others = [self._left_of(service) for service in self.last if service != _LAST]
            if self.stages.get(_LAST):
                return max(0.0, self._left_of(_LAST))
            ready = max(self.last[service][-1][1] for service in self.last if service != _LAST)
            return max(0.0, *others) + self.last[_LAST][-1][1] - ready
        except (KeyError, ValueError):  # it went another way, or was another version's
            return None

    def _left_of(self, service: str) -> float:
        last = self.last[service] if self.last else []
        whole = last[-1][1]
        if service not in self.stages:
            return whole - self.elapsed_s
        doing, since = self.stages[service][-1]
        if doing == READY:
            return 0.0
        at = [name for name, _ in last].index(doing)
        return whole - min(last[at][1] + self.elapsed_s - since, last[at + 1][1])

    def table(self) -> Table:
        """Content of the terminal."""
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        for service, name in NAMES.items():
            doing, since = self.stages.get(service, [("", 0.0)])[-1]
            known = doing not in ("", READY)
            table.add_row(name, doing, f"{self.elapsed_s - since:.1f} s" if known else "")
        table.add_row("starting", left(self.elapsed_s, self.left_s()), "", style="dim")
        return table

    __rich__ = table


def _key(options: StackOptions) -> tuple[object, ...]:
    """Properties that decide the time that a start takes."""
    names = [field.name for field in fields(ModelFlags)]
    return platform.node(), options.max_sessions, *(getattr(options, name) for name in names)


@contextmanager
def showing(options: StackOptions, console: Console) -> Iterator[OnStage]:
    """Show a start on a console; yield what the stack calls with each stage.

    `options` are the stack's, resolved. On a terminal all services are shown while they start;
    elsewhere each stage is a line.
    """
    start = StartProgress(_read(recall(_KIND, *_key(options))))
    if console.is_terminal:
        from rich.live import Live

        with Live(start, console=console, transient=True, refresh_per_second=8):
            yield start.stage
    else:
        took = start.last_s
        known = f"; the last start took {took:.1f} s" if took else ""
        console.print(f"starting {options.model}{known}", markup=False)

        def report(service: str, doing: str) -> None:
            start.stage(service, doing)
            console.print(f"{start.elapsed_s:6.1f} s  {NAMES[service]}: {doing}", markup=False)

        yield report
    remember(_KIND, start.stages, *_key(options))


@asynccontextmanager
async def shown(stack: Stack, console: Console) -> AsyncIterator[Stack]:
    """Run a stack while the context is open, and show its start."""
    with showing(stack.options, console) as stack.on_stage:
        await stack.__aenter__()
    try:
        yield stack
    finally:
        await stack.__aexit__()


def _read(document: Any) -> Stages | None:
    """Check what was remembered."""
    try:
        stages = {
            service: [(str(doing), float(since)) for doing, since in document[service]]
            for service in NAMES
        }
    except (KeyError, TypeError, ValueError):
        return None
    return stages if all(of and of[-1][0] == READY for of in stages.values()) else None
