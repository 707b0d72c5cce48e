"""Which source's guess is worth most: what was accepted of each so far, and what rounds cost. Pure.

All guesses of all sources are compared with the text that followed, used or not, since they cost
microseconds; of the model, only what it drafted. Sequences begin with what others have taught.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from flyspec.prefix import num_same
from flyspec.recent import Share

PRIOR, PRIOR_WEIGHT = 0.7, 4.0
"""A token's chance of being accepted before anything is known, and its weight in tokens."""
OTHERS_WEIGHT = 16.0
"""Weight of other sequences' evidence, in tokens."""
OTHERS_MEMORY, MEMORY = 0.9995, 0.98
"""Factors by which evidence fades with each further token, of others and of the sequence's own."""
NEWER = 0.2
"""Weight of the newest time in the mean times."""


Evidence = dict[Hashable, Share]
"""Shares of right tokens, by the class of a guess: its source, and how well it matched."""


def expected(chance: float, count: int) -> float:
    """Return how many of `count` tokens are accepted on average, each with this chance."""
    return float(count) if chance >= 1.0 else chance * (1.0 - chance**count) / (1.0 - chance)


@dataclass(slots=True)
class Chooser:
    """One sequence's estimates of its drafts' chances and of the time that rounds take, in ns.

    `others` is the evidence of all sequences, which this one adds to.
    """

    others: Evidence
    rest_ns: float = 0.0
    token_ns: float = 0.0
    own: Evidence = field(default_factory=dict)

    def chance(self, kind: Hashable) -> float:
        """Return the chance that a token of a guess of this class is accepted."""
        others, own = self.others.get(kind), self.own.get(kind)
        prior = others.value(PRIOR, PRIOR_WEIGHT) if others else PRIOR
        return own.value(prior, OTHERS_WEIGHT) if own else prior

    def followed(self, kind: Hashable, guess: Sequence[int], text: Sequence[int]) -> None:
        """Learn from a guess, and the text that followed in its place."""
        right = num_same(guess, text)
        missed = right < min(len(guess), len(text))
        for evidence, memory in ((self.others, OTHERS_MEMORY), (self.own, MEMORY)):
            evidence.setdefault(kind, Share()).observe(right, memory, right + missed)

    def rested(self, ns: int) -> None:
        """Learn how long it was from a proposal to the next request."""
        self.rest_ns = _mean(self.rest_ns, ns)

    def drafted(self, num_tokens: int, ns: int) -> None:
        """Learn how long the model took."""
        if num_tokens:
            self.token_ns = _mean(self.token_ns, ns / num_tokens)

    def worth(self, accepted: float, num_drawn: int) -> float:
        """Return a round's tokens per ns, if the model draws `num_drawn` of its drafts."""
        return (1.0 + accepted) / max(1.0, self.rest_ns + num_drawn * self.token_ns)


def _mean(mean: float, value: float) -> float:
    return mean + NEWER * (value - mean) if mean else value
