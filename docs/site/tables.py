"""Markdown of the generated pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; line breaks and bars in cells are kept from breaking it."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(text: str) -> str:
    pieces = " ".join(text.split()).replace("|", "\\|").split("`")
    pieces[::2] = [piece.replace("<", "&lt;") for piece in pieces[::2]]  # not in code
    return "`".join(pieces)
