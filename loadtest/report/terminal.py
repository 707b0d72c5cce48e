"""The table that a load test prints."""

from __future__ import annotations

import sys
from typing import Any

from loadtest.report.text import highlights, table


def markdown(document: dict[str, Any]) -> str:
    """Table and findings for a document."""
    columns, rows = table(document)
    lines = [columns, ["---", "---", *["---:"] * (len(columns) - 2)], *rows]
    found = [f"- {line}" for line in highlights(document)]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *found])


def show(document: dict[str, Any], width: int | None = None) -> None:
    """Print phases, findings, checks and the verdict to standard output."""
    from rich.console import Console
    from rich.table import Table

    wide = None if sys.stdout.isatty() else 200
    console = Console(width=width or wide, highlight=False, markup=False)
    columns, rows = table(document)
    shown = Table()
    for index, column in enumerate(columns):
        shown.add_column(column, justify="left" if index < 2 else "right")
    for row in rows:
        shown.add_row(*row)
    console.print(shown)
    for line in highlights(document):
        console.print(line)
    for warning in document["warnings"]:
        console.print(f"warning: {warning}")
    for check in document["checks"]:
        console.print(f"{'ok    ' if check['passed'] else 'BROKEN'} {check['name']}: "
                      f"{check['said']}")  # fmt: skip
    console.print("PASSED" if document["passed"] else "FAILED")
