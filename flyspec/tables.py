"""Tables for a terminal, and in Markdown."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

Column = tuple[str, str | Callable[[Any], str]]
"""A heading, and how to render a record: a format such as `{.tokens:,}`, or a function."""


_GAP = 2
"""Cells between columns."""
_FOLDED = 24
"""Cells that a column always has; if the table does not fit, wider ones are folded."""
_UNFOLDED = 1 << 16
_UNLIMITED = 1000
"""Cells of a line in a file."""


@dataclass(frozen=True)
class FittedTable:
    """A table that fits where it is printed. The first `left` columns are words.

    If it is too wide, its words are folded; if that is not enough, its columns are divided among
    several tables, each beginning with the first `keys` columns. A `stacked` table, for long texts,
    becomes a block of lines for each row instead.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str | None = None
    left: int = 1
    keys: int = 1
    stacked: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text(self.title, style="italic")
        every, width = list(range(len(self.columns))), options.max_width
        if self._width(every) <= width:
            yield self._table(every)
        elif self.stacked:
            yield from self._blocks()
        else:
            for number, part in enumerate(self._parts(width)):
                if number:
                    yield Text("")
                yield self._table(part)

    def _parts(self, width: int) -> Iterator[list[int]]:
        """Divide the columns among tables of this width."""
        keys = list(range(self.keys))
        part = list(keys)
        for column in range(self.keys, len(self.columns)):
            if part != keys and self._width([*part, column], _FOLDED) > width:
                yield part
                part = list(keys)
            part.append(column)
        yield part

    def _width(self, columns: Sequence[int], most: int = _UNFOLDED) -> int:
        """Cells of these columns, if none takes more than `most`."""
        return sum(min(most, self._cells(c)) for c in columns) + _GAP * (len(columns) - 1)

    def _cells(self, column: int) -> int:
        return max(map(_cells, [self.columns[column], *(row[column] for row in self.rows)]))

    def _table(self, columns: Sequence[int]) -> Table:
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0))
        for index in columns:
            words = index < self.left
            folds = words or self._cells(index) > _FOLDED
            table.add_column(
                self.columns[index],
                justify="left" if words else "right",
                no_wrap=not folds,
                overflow="fold" if folds else "ellipsis",
            )
        for row in self.rows:
            table.add_row(*(row[index] for index in columns))
        return table

    def _blocks(self) -> Iterator[RenderableType]:
        for row in self.rows:
            yield row[0]
            block = Table.grid(padding=(0, _GAP, 0, 0))
            block.add_column(no_wrap=True)
            block.add_column(overflow="fold")
            for name, value in zip(self.columns[1:], row[1:], strict=True):
                block.add_row(f"  {name}", value)
            yield block


def _cells(cell: str) -> int:
    return max(map(cell_len, cell.split("\n")))


def make_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    title: str | None = None,
    left: int = 1,
    stacked: bool = False,
) -> FittedTable:
    """Return a table with `left` left-aligned columns of words, then right-aligned ones."""
    return FittedTable(columns, [[*row] for row in rows], title, left, max(1, left), stacked)


def record_table(
    columns: Sequence[Column],
    records: Iterable[Any],
    title: str | None = None,
    left: int = 1,
    stacked: bool = False,
) -> FittedTable:
    """Return a table with one row per record; `-` for missing numbers."""
    rows = ([cell(form, record) for _, form in columns] for record in records)
    return make_table([heading for heading, _ in columns], rows, title, left, stacked)


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    rule = ["---" if i < left else "---:" for i in range(len(columns))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, rule, *rows))


def rate(per_second: float) -> str:
    """Return a rate with about three digits."""
    if per_second >= 100:
        return f"{per_second:,.0f}"
    return f"{per_second:.1f}" if per_second >= 10 else f"{per_second:.2f}"


def cell(form: str | Callable[[Any], str], record: Any) -> str:
    """Render a record for a column of this form."""
    if callable(form):
        return form(record)
    try:
        return form.format(record)
    except TypeError:  # None cannot be formatted as a number
        return "-"


def result_console() -> Console:
    """Return a console on standard output for tables.

    On a terminal they fit it. A file or a pipe gets them whole, one line per row, unless the
    environment variable COLUMNS says how wide they may be.
    """
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _UNLIMITED
    return console
