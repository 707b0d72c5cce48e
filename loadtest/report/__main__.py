"""Recreates page and plot from a load test's JSON: `python -m loadtest.report FILE.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flyspec.cli.options import with_flags
from flyspec.cli.program import run, single
from flyspec.flags import Flag
from loadtest.report.files import LabResults, read
from loadtest.report.load import LoadReport


@with_flags
def render(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Report that --output wrote.")],
    results: LabResults,
    markdown: Annotated[bool, Flag("Print the tables as Markdown.")] = False,
) -> None:
    """Recreate a load test's report from its JSON."""
    results.check()
    report = LoadReport(read(file))
    if markdown:
        results.write(report)
        print(report.markdown())
    else:
        results.finish(report)


if __name__ == "__main__":
    run(single(render))
