"""Recreates page and plot from a load test's JSON: `python -m loadtest.report FILE.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flyspec.cli.options import with_flags
from flyspec.cli.program import run, single
from flyspec.flags import Flag
from loadtest.report.files import ReportFiles, read
from loadtest.report.load import LoadReport
from loadtest.report.terminal import markdown as as_markdown


@with_flags
def render(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Report that --json wrote.")],
    files: ReportFiles,
    markdown: Annotated[bool, Flag("Print the tables as Markdown.")] = False,
) -> None:
    """Recreate a load test's report from its JSON."""
    files.validate()
    report = LoadReport(read(file))
    if markdown:
        files.write(report)
        print(as_markdown(report))
    else:
        files.finish(report)


if __name__ == "__main__":
    run(single(render))
