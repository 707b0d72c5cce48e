"""Tables for a terminal or, with `MARKDOWN`, for a document."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import MARKDOWN
from rich.table import Table

__all__ = ["MARKDOWN", "Table", "make_table"]


def make_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    title: str | None = None,
    left: int = 1,
    **more: Any,
) -> Table:
    """Columns of words, the first `left`, and behind them columns of numbers, never broken.

    `more` is for rich's `Table`, such as `box=MARKDOWN`.
    """
    table = Table(title=title, title_justify="left", **more)
    for index, column in enumerate(columns):
        words = index < left
        table.add_column(column, justify="left" if words else "right", no_wrap=not words)
    for row in rows:
        table.add_row(*row)
    return table
