"""From a measurement to its results: files, plots, tables and the exit code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyspec.flags import Flag

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


@dataclass(frozen=True)
class BenchReport:
    """The result of a measurement as JSON, as tables with notes, and as a plot.

    `samples` are part of the JSON only in a file. Dataclasses in either become objects. `columns`
    is the width of the tables if they are not shown on a terminal.
    `passed`: whether everything that had to hold did.
    """

    document: Mapping[str, Any]
    shown: Sequence[RenderableType]
    samples: Mapping[str, Any] = field(default_factory=dict)
    plot: Callable[[Path], None] | None = None
    columns: int = 132
    passed: bool = True


def notes(text: str) -> RenderableType:
    """Return notes to show below a table."""
    from rich.text import Text

    return Text(text, style="dim")


@dataclass(frozen=True)
class Results:
    """Where results go."""

    json: Annotated[bool, Flag("Print one JSON document instead of tables.")] = False
    output: Annotated[Path | None, Flag(
        "Also write the JSON document, with all samples, to a file.",
    )] = None  # fmt: skip
    plot: Path | None = None

    def of(self, measure: Callable[[], BenchReport]) -> None:
        """Measure, write and plot what was asked for, and print; exit with 1 if it did not pass.

        Raises `ConfigError` for files that cannot be written, before anything is measured.
        """
        from flyspec.cli.runtime import print_json, to_json
        from flyspec.drawing import FORMATS, check_file

        check_file("--plot", self.plot, FORMATS)
        check_file("--output", self.output)
        report = measure()
        if self.output is not None:
            self.output.write_text(to_json({**report.document, **report.samples}) + "\n")
        if self.plot is not None and report.plot is not None:
            report.plot(self.plot)
        if self.json:
            print_json(report.document)
        else:
            console = result_console(report.columns)
            for item in report.shown:
                console.print(item, markup=False, crop=False)
        if not report.passed:
            raise typer.Exit(1)


@dataclass(frozen=True)
class PlottedResults(Results):
    """Where results go, a plot included."""

    plot: Annotated[Path | None, Flag(
        "Write a plot to a .svg, .png or .pdf file (needs matplotlib).",
    )] = None  # fmt: skip


def result_console(columns: int = 132) -> Console:
    """Return a console on standard output, wide enough for tables if it is not a terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, columns)
    return console
