"""The text of a report: for a terminal, and as Markdown."""

from __future__ import annotations

import sys

from rich.console import Console

from flyspec import tables
from loadtest.report.base import LabReport


def markdown(report: LabReport) -> str:
    """Tables and findings for a document."""
    parts = [tables.markdown(t.columns, t.rows, left=t.left) for t in report.tables()]
    return "\n\n".join([*parts, "\n".join(f"- {line}" for line in report.lines())])


def show(report: LabReport, width: int | None = None) -> None:
    """Print tables, findings, checks and the verdict to standard output."""
    wide = None if sys.stdout.isatty() else 200
    console = Console(width=width or wide, highlight=False, markup=False)
    for table in report.tables():
        console.print(tables.make_table(table.columns, table.rows, left=table.left))
    for line in report.lines():
        console.print(line)
    for warning in report.document["warnings"]:
        console.print(f"warning: {warning}")
    for check in report.document["checks"]:
        console.print(f"{'ok    ' if check['passed'] else 'BROKEN'} {check['name']}: "
                      f"{check['said']}")  # fmt: skip
    console.print("PASSED" if report.passed else "FAILED")
