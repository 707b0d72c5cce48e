"""Tables for a terminal or, with `box=MARKDOWN`, for a document."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.box import MARKDOWN
from rich.table import Table

__all__ = ["MARKDOWN", "Column", "Table", "make_table", "record_table"]

Column = tuple[str, str | Callable[[Any], str]]
"""Its heading, and how a record fills it: a format such as `{.tokens:,}`, or a function."""


def make_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    title: str | None = None,
    left: int = 1,
    **more: Any,
) -> Table:
    """Columns of words, the first `left`, and behind them columns of numbers, never broken.

    `more` is for rich's `Table`.
    """
    table = Table(title=title, title_justify="left", **more)
    for index, column in enumerate(columns):
        words = index < left
        table.add_column(
            column,
            justify="left" if words else "right",
            no_wrap=not words,
            overflow="fold" if words else "ellipsis",
        )
    for row in rows:
        table.add_row(*row)
    return table


def record_table(
    columns: Sequence[Column], records: Iterable[Any], title: str | None = None, **more: Any
) -> Table:
    """A row a record; `-` for a number that it does not have."""
    rows = ([_cell(form, record) for _, form in columns] for record in records)
    return make_table([heading for heading, _ in columns], rows, title, **more)


def _cell(form: str | Callable[[Any], str], record: Any) -> str:
    if callable(form):
        return form(record)
    try:
        return form.format(record)
    except TypeError:  # None has no digits
        return "-"
