"""A minimal terminal emulator."""

from __future__ import annotations

import re
import unicodedata

_CODE = re.compile(r"\x1b\[([\d;]*)([A-Za-z])|(.)", re.DOTALL)


class Terminal:
    """Cells, a cursor, wrapping when the next character does not fit; no limit below."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.cells: dict[tuple[int, int], str] = {}
        self.row = self.column = 0

    def write(self, text: str) -> None:
        for match in _CODE.finditer(text):
            number, command, character = match.groups()
            if command == "A":
                self.row = max(0, self.row - int(number or 1))
            elif command == "J":
                here = (self.row, self.column)
                self.cells = {at: c for at, c in self.cells.items() if at < here}
            elif command == "m":
                pass
            elif command is not None:
                raise AssertionError(f"no terminal code known: {match[0]!r}")
            else:
                self.put(character)

    def put(self, character: str) -> None:
        if character == "\n":
            self.row, self.column = self.row + 1, 0
        elif character == "\r":
            self.column = 0
        elif character == "\t":
            self.column = min(self.column // 8 * 8 + 8, self.columns - 1)
        else:
            width = 2 if unicodedata.east_asian_width(character) in "WF" else 1
            if self.column + width > self.columns:
                self.row, self.column = self.row + 1, 0
            self.cells[self.row, self.column] = character
            self.column += width

    @property
    def state(self) -> object:
        return self.cells, self.row, self.column
