"""The table that a load test prints."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console

from flyspec import tables
from loadtest.report.text import highlights, table


def markdown(document: dict[str, Any]) -> str:
    """Table and findings for a document."""
    found = [f"- {line}" for line in highlights(document)]
    return "\n".join([tables.markdown(*table(document), left=2), "", *found])


def show(document: dict[str, Any], width: int | None = None) -> None:
    """Print phases, findings, checks and the verdict to standard output."""
    wide = None if sys.stdout.isatty() else 200
    console = Console(width=width or wide, highlight=False, markup=False)
    console.print(tables.make_table(*table(document), left=2))
    for line in highlights(document):
        console.print(line)
    for warning in document["warnings"]:
        console.print(f"warning: {warning}")
    for check in document["checks"]:
        console.print(f"{'ok    ' if check['passed'] else 'BROKEN'} {check['name']}: "
                      f"{check['said']}")  # fmt: skip
    console.print("PASSED" if document["passed"] else "FAILED")
