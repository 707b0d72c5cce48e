"""How likely drafts are accepted: position by position, by evidence that fades. Pure.

A text changes from predictable to not and back, so what happened last counts most. Texts differ,
too: drafts that many others have been accepted before are accepted more often than the first ones.
So a position that was seldom reached is taken for what it was in other texts, as far as this one is
as good as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul

FADE, SHARED_FADE = 0.97, 0.999
"""What a token's evidence is worth when another one has been seen: about 33 count of a text, and
1000 of all."""
PRIOR_TOKENS = 4.0
"""Tokens of evidence that the beginning is worth, on average and then at each position."""


class SharedAcceptance:
    """Of many generations; `prior` is the share of drafts accepted before anything is known."""

    def __init__(self, prior: float, most: int, fade: float = SHARED_FADE) -> None:
        self._reached, self._accepted = [0.0] * most, [0.0] * most
        self._all = self._good = 0.0
        self._prior, self._fade = prior, fade
        self.num_seen = 0
        """Tokens of evidence so far."""

    def checked(self, num_drafts: int, num_accepted: int) -> None:
        """A round's drafts were checked; the first ones stand."""
        reached, accepted = self._reached, self._accepted
        seen = min(num_drafts, num_accepted + 1, len(reached))
        fade = self._fade**seen
        for position in range(len(reached)):
            reached[position] *= fade
            accepted[position] *= fade
        for position in range(seen):
            reached[position] += 1.0
        for position in range(min(seen, num_accepted)):
            accepted[position] += 1.0
        self._all = self._all * fade + seen
        self._good = self._good * fade + min(seen, num_accepted)
        self.num_seen += seen

    def followed(self, accepted: Sequence[bool]) -> None:
        """Whether tokens of plain decoding would have been accepted, one behind the other.

        That is as rounds would have gone which ended at each that would not.
        """
        run = 0
        for good in accepted:
            run += good
            if not good or run == len(self._reached):
                self.checked(len(self._reached), run)
                run = 0
        if run:
            self.checked(run, run)

    @property
    def mean(self) -> float:
        """Share of drafts accepted, on average, of those that were reached."""
        return (self._good + PRIOR_TOKENS * self._prior) / (self._all + PRIOR_TOKENS)

    def at(self, position: int) -> float:
        """Share of the drafts accepted that were reached at a position, counted from 0."""
        usual = PRIOR_TOKENS * self.mean
        return (self._accepted[position] + usual) / (self._reached[position] + PRIOR_TOKENS)

    def survivals(self, count: int, hopeful: bool = False) -> list[float]:
        """For each of the first positions, the chance to be reached and accepted.

        What is refused is less by one standard error of what was seen for who is `hopeful`.
        """
        chances: Iterable[float] = map(self.at, range(count))
        if hopeful:
            refused = 1.0 - 1.0 / math.sqrt(1.0 + self._all - self._good)
            chances = (1.0 - refused * (1.0 - chance) for chance in chances)
        return list(accumulate(chances, mul))


class Acceptance(SharedAcceptance):
    """Of one generation, which begins as `others` were."""

    def __init__(self, others: SharedAcceptance, most: int) -> None:
        super().__init__(others.mean, most, FADE)
        self._others = others

    def compare(self, others: SharedAcceptance) -> None:
        """Take what this text has not shown from these instead."""
        self._others, self._prior = others, others.mean

    def at(self, position: int) -> float:
        """Share of the drafts accepted that were reached at a position, counted from 0."""
        others = self._others
        # Of drafts that are refused, this text has so many times as many as the others.
        ratio = (1.0 - self.mean) / max(1e-9, 1.0 - others.mean)
        usual = PRIOR_TOKENS * (1.0 - min(1.0, ratio * (1.0 - others.at(position))))
        return (self._accepted[position] + usual) / (self._reached[position] + PRIOR_TOKENS)
