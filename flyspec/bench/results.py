"""The result of any measurement, in all its forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Report:
    """The result of a measurement as JSON, as tables with notes, and as a plot.

    `samples` are part of the JSON only in a file. Dataclasses in either become objects.
    """

    document: Mapping[str, Any]
    shown: Sequence[Table | Text | str]
    samples: Mapping[str, Any] = field(default_factory=dict)
    plot: Callable[[Path], None] | None = None
    columns: int = 132
    """Width of the tables if they are not shown on a terminal."""


def notes(text: str) -> Text:
    """Return notes to show below a table."""
    return Text(text, style="dim")
