"""From a measurement to its results: files, plots, tables and the exit code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from flyspec.cli.json_output import print_json, to_json
from flyspec.cli.program import check_file, say
from flyspec.concurrency import StoppedEarly
from flyspec.errors import ConfigError
from flyspec.flags import Flag
from flyspec_lab.drawing import FORMATS

if TYPE_CHECKING:
    from rich.console import RenderableType

_results = partial(Flag, group="Results")


class MeasurementReport(Protocol):
    """The result of a measurement as JSON, as tables with notes, and as a plot.

    `samples` are part of the JSON only in a file. Dataclasses in either become objects. `passed`:
    whether everything that had to hold did.
    """

    @property
    def document(self) -> Mapping[str, Any]: ...
    @property
    def samples(self) -> Mapping[str, Any]: ...
    @property
    def shown(self) -> Sequence[RenderableType]: ...
    @property
    def plot(self) -> Callable[[Path], None] | None: ...
    @property
    def passed(self) -> bool: ...


@dataclass(frozen=True)
class BenchReport:
    """A `MeasurementReport` of given parts."""

    document: Mapping[str, Any]
    shown: Sequence[RenderableType]
    samples: Mapping[str, Any] = field(default_factory=dict)
    plot: Callable[[Path], None] | None = None
    passed: bool = True


def notes(text: str) -> RenderableType:
    """Return notes to show below a table."""
    from rich.text import Text

    return Text(text, style="dim")


# fmt: off
@dataclass(frozen=True)
class Results:
    """Where results go."""

    json: Annotated[bool, _results("Print one JSON document instead of tables.")] = False
    output: Annotated[Path | None, _results(
        "Also write the JSON document, with all samples, to a file.",
    )] = None
    plot: Path | None = None
    # fmt: on

    def check(self) -> None:
        """Raise `ConfigError` for files that cannot be written."""
        check_file("--plot", self.plot, FORMATS)
        self.check_output()

    def check_output(self) -> None:
        check_file("--output", self.output)

    @property
    def document_file(self) -> Path | None:
        """Where the JSON document goes."""
        return self.output

    def write(self, report: MeasurementReport) -> None:
        """Write the files."""
        if self.document_file is not None:
            self.document_file.write_text(to_json({**report.document, **report.samples}) + "\n")
        if self.plot is not None and report.plot is not None:
            report.plot(self.plot)

    def finish(self, report: MeasurementReport) -> int:
        """Write the files and print the report; return the exit code: 0 if it passed, else 1."""
        self.write(report)
        if self.json:
            print_json(report.document)
        else:
            from flyspec.tables import result_console

            console = result_console()
            for item in report.shown:
                console.print(item, markup=False, crop=False)
        return 0 if report.passed else 1

    def of(self, measure: Callable[[], MeasurementReport]) -> None:
        """Measure, once the files have been checked, and finish; exit unless it passed.

        After Ctrl-C, what was measured until then is shown; the exit code is 130.
        """
        self.check()
        try:
            code = self.finish(measure())
        except StoppedEarly as end:
            if end.reached is not None:
                self.finish(end.reached)
                say("interrupted; these are the results until then")
            raise
        if code:
            raise typer.Exit(code)


# fmt: off
@dataclass(frozen=True)
class PlottedResults(Results):
    """Where results go, a plot included."""

    plot: Annotated[Path | None, _results(
        "Write a plot to a .svg, .png or .pdf file.",
    )] = None
    # fmt: on


# fmt: off
@dataclass(frozen=True)
class RunResults(PlottedResults):
    """Where a run is kept, so that it can go on, and where its results go."""

    output: Annotated[Path | None, _results(
        "Directory to keep the run in: each text as it is made (Parquet), and the JSON document.",
        metavar="RUN",
    )] = None
    resume: Annotated[bool, _results(
        "Go on with the run in --output, or begin it: make what is missing or failed.",
    )] = False
    mixed_versions: Annotated[bool, _results(
        "With --resume: also if another version of flyspec made the rest.",
    )] = False
    # fmt: on

    def check_output(self) -> None:
        if self.resume and self.output is None:
            raise ConfigError("--resume needs the --output of the run to go on with")
        if self.output is not None and self.output.suffix == ".json":
            raise ConfigError(
                f"--output {self.output}: is a directory now, which has the JSON document besides "
                "the texts; for the document alone use --json"
            )

    @property
    def document_file(self) -> Path | None:
        return None if self.output is None else self.output / "report.json"
