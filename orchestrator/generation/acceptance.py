"""How likely drafts are accepted: position by position, by evidence that fades. Pure.

A text changes from predictable to not and back, so what happened last counts most. A position that
was seldom reached is taken for as good as all are on average.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul

FADE = 0.97
"""What a token's evidence is worth when another one has been seen: about 33 count."""
PRIOR_TOKENS = 4.0
"""Tokens of evidence that the beginning is worth, on average and then at each position."""


class Acceptance:
    """Of one generation; `prior` is the share of drafts accepted that it begins with."""

    def __init__(self, prior: float, most: int) -> None:
        self._reached = [0.0] * most
        self._accepted = [0.0] * most
        self._all, self._good = PRIOR_TOKENS, PRIOR_TOKENS * prior
        self.num_seen = 0
        """Tokens of evidence so far."""

    def checked(self, num_drafts: int, num_accepted: int) -> None:
        """A round's drafts were checked; the first ones stand."""
        reached, accepted = self._reached, self._accepted
        seen = min(num_drafts, num_accepted + 1, len(reached))
        fade = FADE**seen
        for position in range(len(reached)):
            reached[position] *= fade
            accepted[position] *= fade
        for position in range(seen):
            reached[position] += 1.0
        for position in range(min(seen, num_accepted)):
            accepted[position] += 1.0
        self.scored(seen, min(seen, num_accepted))

    def scored(self, num_tokens: int, num_good: float) -> None:
        """Tokens of plain decoding, so many of which would have been accepted if drafted."""
        fade = FADE**num_tokens
        self._all = self._all * fade + num_tokens
        self._good = self._good * fade + num_good
        self.num_seen += num_tokens

    @property
    def mean(self) -> float:
        """Share of drafts accepted, on average, of those that were reached."""
        return self._good / self._all

    def survivals(self, count: int) -> list[float]:
        """For each of the first positions, the chance to be reached and accepted."""
        usual = PRIOR_TOKENS * self.mean
        return list(
            accumulate(
                (
                    (accepted + usual) / (reached + PRIOR_TOKENS)
                    for accepted, reached in zip(
                        self._accepted[:count], self._reached[:count], strict=True
                    )
                ),
                mul,
            )
        )
