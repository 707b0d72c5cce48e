"""Tables for a terminal, and in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

__all__ = ["Column", "Table", "cell", "make_table", "markdown", "record_table", "table_of"]

Column = tuple[str, str | Callable[[Any], str]]
"""A heading, and how to render a record: a format such as `{.tokens:,}`, or a function."""


def make_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    title: str | None = None,
    left: int = 1,
) -> Table:
    """Return a table with `left` left-aligned text columns, then right-aligned unwrapped ones."""
    table = Table(title=title, title_justify="left")
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
    columns: Sequence[Column], records: Iterable[Any], title: str | None = None, left: int = 1
) -> Table:
    """Return a table with one row per record; `-` for missing numbers."""
    rows = ([cell(form, record) for _, form in columns] for record in records)
    return make_table([heading for heading, _ in columns], rows, title, left)


def table_of(records: Sequence[Mapping[str, Any]], left: int = 1) -> Table:
    """Return a table of records with the same keys, which head its columns."""
    rows = (
        [f"{v:.3g}" if isinstance(v, float) else str(v) for v in record.values()]
        for record in records
    )
    return make_table([key.replace("_", " ") for key in records[0]], rows, left=left)


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    rule = ["---" if i < left else "---:" for i in range(len(columns))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, rule, *rows))


def cell(form: str | Callable[[Any], str], record: Any) -> str:
    """Render a record for a column of this form."""
    if callable(form):
        return form(record)
    try:
        return form.format(record)
    except TypeError:  # None cannot be formatted as a number
        return "-"
