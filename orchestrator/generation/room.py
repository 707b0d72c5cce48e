"""Where in a round a draft that differs from the target's token has room for its window. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Room(NamedTuple):
    """The window within a round of one rule.

    `reach` places must follow in the round (0: no window); more than `length` drafts are judged as
    several rounds of that many, with a bonus token between two of them (0: always as one). As in
    `verify_service.rules.window`.
    """

    reach: int = 0
    length: int = 0

    def at(self, index: int, num_drafts: int) -> bool:
        """Whether a draft may differ at an index, from 0, of a round of so many."""
        if not self.reach:
            return True
        end = num_drafts
        if self.length:
            end = min(end, index - index % (self.length + 1) + self.length)
        return index + 1 + self.reach <= end


ANYWHERE = Room()
