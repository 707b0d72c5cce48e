"""Estimates how likely drafts are to be accepted, by position, from evidence that fades. Pure.

A text's predictability varies, so recent evidence counts most. It also differs between texts, so
drafts at late positions are accepted more often than first ones: they are only reached in
predictable texts. A rarely reached position is therefore estimated from other texts, adjusted by
how well this text's drafts do compared to theirs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul

FADE, SHARED_FADE = 0.97, 0.999
"""Factor by which evidence fades with each further token: about 33 tokens count in one text, about
1000 across texts."""
PRIOR_TOKENS = 4.0
"""Weight of the prior, in tokens of evidence, for the mean and for each position."""


class SharedAcceptance:
    """The acceptance in many generations; `prior` is the acceptance rate assumed at first."""

    def __init__(self, prior: float, most: int, fade: float = SHARED_FADE) -> None:
        self._reached, self._accepted = [0.0] * most, [0.0] * most
        self._all = self._good = 0.0
        self._prior, self._fade = prior, fade
        self.num_seen = 0
        """Number of tokens of evidence so far."""

    def checked(self, num_drafts: int, num_accepted: int, credit: float = 0.0) -> None:
        """Record that the first `num_accepted` of a round's drafts were accepted.

        `credit` is the chance that the next one would have been in a longer round.
        """
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
        if num_accepted < seen:
            accepted[num_accepted] += credit
        else:
            credit = 0.0  # whatever was rejected is beyond the positions
        self._all = self._all * fade + seen
        self._good = self._good * fade + min(seen, num_accepted) + credit
        self.num_seen += seen

    def followed(self, accepted: Sequence[bool]) -> None:
        """Record whether consecutive tokens of plain decoding would have been accepted.

        They count like rounds that each end at the first rejected token.
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
        """The mean acceptance rate of reached drafts."""
        return (self._good + PRIOR_TOKENS * self._prior) / (self._all + PRIOR_TOKENS)

    def at(self, position: int) -> float:
        """Return the acceptance rate of drafts reached at a position, counted from 0."""
        usual = PRIOR_TOKENS * self.mean
        return (self._accepted[position] + usual) / (self._reached[position] + PRIOR_TOKENS)

    def survivals(self, count: int, hopeful: bool = False) -> list[float]:
        """Return, for each of the first `count` positions, the chance to be reached and accepted.

        If `hopeful`, the rejection rate is reduced by one standard error.
        """
        chances: Iterable[float] = map(self.at, range(count))
        if hopeful:
            refused = 1.0 - 1.0 / math.sqrt(1.0 + self._all - self._good)
            chances = (1.0 - refused * (1.0 - chance) for chance in chances)
        return list(accumulate(chances, mul))


class Acceptance(SharedAcceptance):
    """The acceptance in one generation, initially assumed to be like that of `others`."""

    def __init__(self, others: SharedAcceptance, most: int) -> None:
        super().__init__(others.mean, most, FADE)
        self._others = others

    def compare(self, others: SharedAcceptance) -> None:
        """Use `others` instead for what this text has not shown yet."""
        self._others, self._prior = others, others.mean

    def at(self, position: int) -> float:
        """Return the acceptance rate of drafts reached at a position, counted from 0."""
        others = self._others
        # This text's rejection rate relative to that of the others.
        ratio = (1.0 - self.mean) / max(1e-9, 1.0 - others.mean)
        usual = PRIOR_TOKENS * (1.0 - min(1.0, ratio * (1.0 - others.at(position))))
        return (self._accepted[position] + usual) / (self._reached[position] + PRIOR_TOKENS)
