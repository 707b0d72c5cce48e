"""Streaming to a terminal with text that may have to be taken back.

Text goes out as it comes. To take some back, the screen is cleared from the start of the line that
the first character taken back stands on, and that line is written again: so no cell's width, and no
terminal's way of wrapping, has to be known for what stays.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence

from rich.cells import cell_len
from rich.style import Style

TAB = 8

Piece = tuple[str, Style]


class Screen:
    """What has been written to a terminal. `paint` turns a piece into what the terminal gets.

    `size` gives columns and lines.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        paint: Callable[[str, Style], str],
        size: Callable[[], tuple[int, int]] = shutil.get_terminal_size,
    ) -> None:
        self._write = write
        self._paint = paint
        self._size = size
        self._pieces: list[Piece] = []

    def show(self, pieces: Sequence[Piece]) -> None:
        """Write text at the end."""
        self._pieces += pieces
        self._write("".join(self._paint(*piece) for piece in pieces))

    def replace(self, pieces: Sequence[Piece]) -> None:
        """Make all that was written into `pieces`, which begin like it.

        Lines that have left the screen cannot be changed: then the last line is written once more.
        """
        old, new = _text(self._pieces), _text(pieces)
        same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), None)
        start = old.rfind("\n", 0, min(len(old), len(new)) if same is None else same) + 1
        columns, lines = self._size()
        up = rows(old[start:], columns) - 1
        self._pieces = list(pieces)
        move = "\r\x1b[J" if up < lines else "\n"
        self._write((f"\x1b[{up}A" if 0 < up < lines else "") + move)
        self._write("".join(self._paint(*piece) for piece in _from(pieces, start)))


def rows(text: str, columns: int) -> int:
    """Rows of a terminal that a text takes, begun at the left edge; at least 1."""
    count, column = 1, 0
    for character in text:
        if character == "\n":
            count, column = count + 1, 0
        elif character == "\t":  # never wraps
            column = min((column // TAB + 1) * TAB, columns - 1)
        else:
            width = cell_len(character)
            if column + width > columns:
                count, column = count + 1, 0
            column += width
    return count


def _text(pieces: Sequence[Piece]) -> str:
    return "".join(text for text, _ in pieces)


def _from(pieces: Sequence[Piece], start: int) -> list[Piece]:
    """The pieces of the text from character `start` on."""
    rest = []
    for text, style in pieces:
        if start < len(text):
            rest.append((text[max(0, start) :], style))
        start -= len(text)
    return rest
