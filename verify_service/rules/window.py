"""Windows: does the draft agree with the target again after a mismatch?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """A window inside one round (arXiv 2511.22972, Algorithm 1: the token-level window).

    With positions j = 1..K, a mismatch at j may stand if the next `following` positions all match
    and j + `reach` <= K. Only matches count: a second mismatch inside the window fails it, whether
    or not it would be accepted itself.
    """

    following: int
    reach: int

    def holds(self, index: int, matches: Sequence[bool]) -> bool:
        """Whether the mismatch at `index` (from 0) of a round with these K matches may stand."""
        if index + 1 + self.reach > len(matches):
            return False
        return all(matches[index + 1 : index + 1 + self.following])
