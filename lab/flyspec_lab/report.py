"""The report of a measurement: sections of text, tables and plots, and what they are written to.

A report is shown on a terminal, kept as JSON, or made into one HTML page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from flyspec.cli.json_output import print_json, to_json
from flyspec.cli.program import check_file, say
from flyspec.concurrency import StoppedEarly
from flyspec.errors import ConfigError
from flyspec.flags import Flag
from flyspec.tables import FittedTable, result_console
from flyspec_lab.drawing import FORMATS, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console


_PAGE_WIDTH = 160
"""Characters in a line of an HTML page; tables may be wider."""


@dataclass(frozen=True)
class Plot:
    """A figure of `inches` (width, height); `name` is for files, `caption` a sentence."""

    name: str
    caption: str
    draw: Callable[[Figure], None]
    inches: tuple[float, float] = (7.2, 4.0)

    @cached_property
    def svg(self) -> str:
        """The figure as SVG text."""
        buffer = io.StringIO()
        save(buffer, self.inches, self.draw, "svg", self.name)
        _, begin, rest = buffer.getvalue().partition("<svg")
        return begin + re.sub(r'<g id="[^"]*"', "<g", rest)  # alike in all figures


@dataclass(frozen=True)
class Section:
    """Tables, text about them, and plots."""

    heading: str = ""
    paragraphs: Sequence[str] = ()
    tables: Sequence[FittedTable] = ()
    plots: Sequence[Plot] = ()

    def show(self, console: Console) -> None:
        """Print the heading, tables, and the text about them below."""
        from rich.text import Text

        if self.heading:
            console.print(Text(self.heading, style="bold"))
        for table in self.tables:
            console.print(table, markup=False, crop=False)
        for paragraph in self.paragraphs:
            console.print(Text(paragraph), crop=False)

    @property
    def document(self) -> dict[str, Any]:
        """The section as JSON, without plots and bars in tables."""
        return {
            "heading": self.heading,
            "paragraphs": list(self.paragraphs),
            "tables": [
                {
                    "title": table.title,
                    "columns": list(table.columns),
                    "rows": [[c if isinstance(c, str) else "" for c in r] for r in table.rows],
                    "left": table.left,
                }
                for table in self.tables
            ],
            "plots": [{"name": plot.name, "caption": plot.caption} for plot in self.plots],
        }


Part: TypeAlias = str | FittedTable | Plot | Section
"""Parts of a report; text, tables and plots outside a section have no heading."""


@dataclass(frozen=True)
class Report:
    """A finished measurement.

    `document` is its data, which JSON has, and `samples` what only a file has besides; dataclasses
    in either become objects. `passed`: whether everything that had to hold did. `facts` say what
    it was measured with, by name.
    """

    document: Mapping[str, Any]
    parts: Sequence[Part]
    samples: Mapping[str, Any] = field(default_factory=dict)
    passed: bool = True
    title: str = ""
    subtitle: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def sections(self) -> list[Section]:
        """The parts as sections, without paragraphs that an earlier section has."""
        said: set[str] = set()
        found = []
        for part in self.parts:
            section = part if isinstance(part, Section) else _alone(part)
            new = [text for text in section.paragraphs if text not in said]
            found.append(replace(section, paragraphs=new))
            said.update(new)
        return found

    @property
    def plots(self) -> list[Plot]:
        return [plot for section in self.sections for plot in section.plots]

    def show(self) -> None:
        """Print the sections."""
        console = result_console()
        for section in self.sections:
            section.show(console)

    def json(self) -> str:
        """Return everything as JSON: the data, and what is shown of it as `report`."""
        shown = {
            "title": self.title,
            "subtitle": self.subtitle,
            "facts": self.facts,
            "sections": [section.document for section in self.sections],
        }
        return to_json({**self.document, **self.samples, "report": shown}) + "\n"

    def page(self) -> str:
        """Return one HTML file that needs no other: what a terminal shows, and the plots."""
        from rich.console import Console

        facts = [f"{name}: {value}" for name, value in self.facts.items()]
        failed = "" if self.passed else " (failed)"
        about = Section(self.title + failed, [text for text in (self.subtitle, *facts) if text])
        parts = [f'<!DOCTYPE html>\n<meta charset="utf-8">\n<title>{escape(self.title)}</title>']
        console = Console(record=True, file=io.StringIO(), width=_PAGE_WIDTH, highlight=False)
        for section in (about, *self.sections):
            section.show(console)
            shown = console.export_html(code_format="{code}", inline_styles=True)
            parts += [f"<pre>{shown}</pre>", *(plot.svg for plot in section.plots)]
        return "\n".join(parts) + "\n"

    def write(self, directory: Path) -> Path:
        """Write `report.html`, `report.json` and NAME.svg of each plot; return the first."""
        page = directory / "report.html"
        page.write_text(self.page())
        (directory / "report.json").write_text(self.json())
        for plot in self.plots:
            (directory / f"{plot.name}.svg").write_text(plot.svg)
        return page


def _alone(part: str | FittedTable | Plot) -> Section:
    if isinstance(part, str):
        return Section(paragraphs=[part])
    return Section(tables=[part]) if isinstance(part, FittedTable) else Section(plots=[part])


# --- where results go -------------------------------------------------------------------------

_results = partial(Flag, group="Results")


# fmt: off
@dataclass(frozen=True)
class Results:
    """Destinations of a report: standard output, and files."""

    json: Annotated[bool, _results("Print one JSON document instead of tables.")] = False
    output: Annotated[Path | None, _results(
        "Also write the JSON document, with all samples, to a file.",
    )] = None
    # fmt: on

    def check(self) -> None:
        """Raise `ConfigError` for files that cannot be written."""
        check_file("--output", self.output)

    def write(self, report: Report) -> None:
        """Write the files."""
        if self.output is not None:
            self.output.write_text(report.json())

    def finish(self, report: Report) -> int:
        """Write the files and print the report; return the exit code: 0 if it passed, else 1."""
        self.write(report)
        if self.json:
            print_json(report.document)
        else:
            report.show()
        return 0 if report.passed else 1

    def of(self, measure: Callable[[], Report]) -> None:
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
class PageResults(Results):
    """Destinations of a report that has plots and a page as well; `plot` is of the first."""

    plot: Annotated[Path | None, _results("Write a plot to a .svg, .png or .pdf file.")] = None
    html: Annotated[Path | None, _results(
        "Write the report with its plots as one HTML file.",
    )] = None
    # fmt: on

    def check(self) -> None:
        super().check()
        check_file("--plot", self.plot, FORMATS)
        check_file("--html", self.html, (".html",))

    def write(self, report: Report) -> None:
        super().write(report)
        if self.plot is not None and report.plots:
            save(self.plot, report.plots[0].inches, report.plots[0].draw)
        if self.html is not None:
            self.html.write_text(report.page())


# fmt: off
@dataclass(frozen=True)
class RunResults(Results):
    """The directory of a run, which can go on in it, and of its report."""

    output: Annotated[Path | None, _results(
        "Directory to keep the run in: each text as it is made, and the report with its plots.",
        metavar="RUN",
    )] = None
    resume: Annotated[bool, _results(
        "Go on with the run in --output, or begin it: make what is missing or failed.",
    )] = False
    # fmt: on

    def check(self) -> None:
        if self.resume and self.output is None:
            raise ConfigError("--resume needs the --output of the run to go on with")
        if self.output is not None and self.output.suffix == ".json":
            raise ConfigError(
                f"--output {self.output}: is a directory, which has the JSON document besides the "
                "texts; for the document alone: --json > FILE"
            )

    def write(self, report: Report) -> None:
        if self.output is not None:
            report.write(self.output)
