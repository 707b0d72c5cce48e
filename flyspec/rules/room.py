"""Room within a round for the window of a draft that differs from the target's token. Pure."""

from __future__ import annotations

from typing import NamedTuple


def round_end(index: int, num_drafts: int, length: int) -> int:
    """Return where the round of a draft ends, if `length` (0: all) are one, then a bonus token."""
    if not length:
        return num_drafts
    return min(num_drafts, index - index % (length + 1) + length)


class Room(NamedTuple):
    """The window within a round of one rule.

    `reach` places must follow in the round (0: no window); more than `length` drafts are judged as
    several rounds of that many (0: always as one).
    """

    reach: int = 0
    length: int = 0

    def at(self, index: int, num_drafts: int) -> bool:
        """True if a draft may differ at an index, from 0, of a round of so many."""
        end = round_end(index, num_drafts, self.length)
        return not self.reach or index + 1 + self.reach <= end
