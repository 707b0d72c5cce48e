"""A target's sequence and its content, in units that apply to a draft's tokens as well."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from draft_service.translation.vocabulary import Vocabulary

CONTROL = 256
"""Units below this are bytes of text; a control token's unit is this plus the target's id."""

_SPACE = frozenset(b" \t\r\n")


class TextStream:
    """Token ids of a vocabulary and their units. Places are counted in units."""

    def __init__(self, vocabulary: Vocabulary, token_ids: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self.token_ids: list[int] = []
        self.units: list[int] = []
        self._ends: list[int] = []  # of each token
        self._controls: list[int] = []  # places of control tokens
        self.extend(token_ids)

    def __len__(self) -> int:
        return len(self.units)

    def end_of(self, length: int) -> int:
        return self._ends[length - 1] if length else 0

    def truncate(self, length: int) -> None:
        end = self.end_of(length)
        del self.token_ids[length:], self._ends[length:], self.units[end:]
        del self._controls[bisect_left(self._controls, end) :]

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens; ids without content, such as padding, add no units."""
        units, text, control = self.units, self._vocabulary.bytes, self._vocabulary.control
        for token in token_ids:
            if token in control:
                self._controls.append(len(units))
                units.append(CONTROL + token)
            else:
                units += text.get(token, b"")
            self._ends.append(len(units))
        self.token_ids += token_ids

    def text(self, start: int, end: int) -> bytes:
        """Return the text between two places, which must contain no control token."""
        return bytes(self.units[start:end])

    def text_start(self, place: int) -> int:
        """Return where the text before `place` begins: after a control token, or at the start."""
        index = bisect_left(self._controls, place)
        return self._controls[index - 1] + 1 if index else 0

    def text_end(self, place: int) -> int:
        """Return where the text from `place` on ends: before a control token, or at the end."""
        index = bisect_left(self._controls, place)
        return self._controls[index] if index < len(self._controls) else len(self.units)

    def is_control(self, place: int) -> bool:
        return place < len(self.units) and self.units[place] >= CONTROL

    def is_inside(self, place: int) -> bool:
        """Return whether `place` is in the middle of a character."""
        return place < len(self.units) and 0x80 <= self.units[place] < 0xC0

    def is_space(self, place: int) -> bool:
        return place < len(self.units) and self.units[place] in _SPACE
