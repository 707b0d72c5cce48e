"""An answer that streams to standard output, with what was reached if it is stopped."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from flyspec.cli.options import Color
from flyspec.progress import error_console
from flyspec.rules import Rule
from flyspec.values.requests import GenerateOptions

if TYPE_CHECKING:
    from rich.console import Console

    from flyspec.cli.screen import Piece
    from flyspec.client import AsyncClient, Event
    from flyspec.client.requests import AnyPrompt

DEFAULTS = GenerateOptions(rule=Rule(""), max_tokens=256)
"""Options of `generate` and `chat` unless others are given."""


def wants_color(color: Color) -> bool:
    """True if standard output gets colours."""
    from rich.console import Console

    if color == "auto":
        console = Console()
        return console.is_terminal and not console.no_color
    return color == "always"


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def warn(console: Console, warnings: Sequence[str]) -> None:
    for warning in warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)


def note(console: Console, line: str) -> None:
    """Print a dim line, folded between its parts on a terminal."""
    from flyspec.cli import render

    width = console.width if console.is_terminal else None
    console.print(render.folded(line, width), style="dim", markup=False)


class StreamedAnswer:
    """An answer on its way to standard output; `transcript` has as much of it as arrived."""

    def __init__(self, color: bool) -> None:
        from flyspec.cli import render
        from flyspec.cli.screen import Screen
        from flyspec.client import Transcript

        self.transcript = Transcript()
        self._terminal = sys.stdout.isatty()
        self._color = color
        self._screen = Screen(write, render.paint if color else lambda text, _: text)
        self._began = time.perf_counter()
        self.seconds = 0.0

    async def stream(
        self,
        client: AsyncClient,
        source: AnyPrompt,
        options: GenerateOptions,
        echo: Sequence[Piece] = (),
    ) -> None:
        """Show a legend and `echo`, the answer, its summary; if cancelled, what was reached."""
        # Only a terminal can retract text.
        asked = replace(options, eager=options.eager and self._terminal)
        stopped: asyncio.CancelledError | None = None
        try:
            async with aclosing(client.generate(source, asked)) as events:  # type: ignore[type-var]
                async for event in events:
                    self._show(event, echo)
        except asyncio.CancelledError as error:
            stopped = error
        finally:
            self.seconds = time.perf_counter() - self._began
            if self.transcript.started is not None:
                write("\n")
        note(error_console(), self._summary(options))
        if stopped is not None:
            raise stopped

    def _show(self, event: Event, echo: Sequence[Piece]) -> None:
        from flyspec.cli import render
        from flyspec.client import Chunk, Retract, Started

        self.transcript.add(event)
        match event:
            case Started():
                console = error_console()
                if echo:
                    console.print(render.legend(console.width))
                warn(console, event.warnings)
                self._screen.show(echo)
            case Chunk() if self._terminal or self._color:
                self._screen.show(render.pieces(event))
            case Chunk():
                write(event.text)  # as the model wrote it
            case Retract():
                stands = [piece for c in self.transcript.chunks for piece in render.pieces(c)]
                self._screen.replace([*echo, *stands])

    def _summary(self, options: GenerateOptions) -> str:
        """Describe the answer, or what was reached of it."""
        from flyspec.cli import render

        started, generation = self.transcript.started, self.transcript.generation
        if started is None:
            return f"stopped after {self.seconds:.2f} s, before the first token"
        if generation is None:
            line = render.stopped(started, self.transcript.chunks, self.seconds)
        else:
            line = render.summary(generation, self.seconds)
        return line if options.sampling.greedy else f"{line} · seed {started.seed}"
