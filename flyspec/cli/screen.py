"""Streaming text to a terminal when some of it may be retracted.

Text is written as it arrives. To retract some, the screen is cleared from the start of the line
with the first retracted character, and that line is written again. So cell widths and the
terminal's wrapping do not matter for the text that stays.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence

from rich.cells import cell_len
from rich.style import Style

TAB = 8

Piece = tuple[str, Style]


class Screen:
    """The text written to a terminal. `paint` renders a piece for the terminal.

    `size` returns columns and lines.
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
        self._pieces += pieces
        self._write("".join(self._paint(*piece) for piece in pieces))

    def replace(self, pieces: Sequence[Piece]) -> None:
        """Replace the written text by `pieces`, which begin like it.

        Lines that have scrolled off cannot be changed; then the last line is written again.
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
    """Return the terminal rows of a text that starts at the left edge; at least 1."""
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
