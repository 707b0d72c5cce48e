"""How many rounds a text takes at any K, from how long a drafter agrees with the target.

With a token-exact rule, whether a draft is accepted depends on the text alone, not on K: a drafter
agrees with the target for a run of tokens, then differs at one. `survival[a]` is the probability
that, after a difference, the next a tokens agree. A round begins behind a difference, or K + 1
tokens behind the begin of another one: all of its drafts and its bonus token agreed. So with the
rounds of a run, N(K) = sum over m of survival[m (K + 1)], and the length of a run with the token
that ends it, L = sum over a of survival[a] (renewal reward theorem):

    tokens per round = L / N(K)

For tokens that agree independently with probability p this is the geometric sum of Leviathan et
al. (arXiv 2211.17192, equation 1), (1 - p^(K + 1)) / (1 - p). Under other rules a round may judge
the same drafts otherwise at another K; it is an estimate there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flyspec.values.tokens import Origin

ENOUGH = 20
"""Times that a number of agreeing tokens must have been seen to have a probability of its own."""
MOST_TOKENS = 4096
"""Tokens of a run after which it counts as endless."""
_NEGLIGIBLE = 1e-9
_UNDRAFTED = Origin.BONUS, Origin.PLAIN
_BEGIN = Origin.CORRECTION, Origin.PLAIN


@dataclass(frozen=True)
class AgreeingRuns:
    """`survival` is the probability of a run of at least 0, 1, 2... tokens; the first is 1.

    Beyond, each further token agrees with probability `tail`.
    """

    survival: Sequence[float]
    tail: float

    @classmethod
    def of(cls, texts: Iterable[Sequence[Origin]]) -> AgreeingRuns:
        """Estimate it from the origins of the tokens of texts (Kaplan and Meier's estimator).

        A bonus token was not drafted: it prolongs a run, but says nothing of its end. A plainly
        decoded one begins a run. Raises `ValueError` if nothing was drafted.
        """
        reached: list[int] = []
        agreed: list[int] = []
        for origins in texts:
            age = 0
            for origin in origins:
                if origin not in _UNDRAFTED:
                    more = [0] * (age + 1 - len(reached))
                    reached += more
                    agreed += more
                    reached[age] += 1
                    agreed[age] += origin is not Origin.CORRECTION
                age = 0 if origin in _BEGIN else age + 1
        if not sum(reached):
            raise ValueError("nothing was drafted")
        known = next((a for a, seen in enumerate(reached) if seen < ENOUGH), len(reached))
        survival = [1.0]
        for age in range(known):
            survival.append(survival[-1] * agreed[age] / reached[age])
        late = known // 2
        return cls(tuple(survival), sum(agreed[late:]) / sum(reached[late:]))

    def tokens_per_round(self, num_drafts: int) -> float:
        """Return the mean tokens of a round, its correction or bonus included."""
        runs = self._runs()
        return sum(runs) / sum(runs[:: num_drafts + 1])

    def whole(self, num_drafts: int) -> float:
        """Return the share of rounds whose drafts are all accepted, and the bonus token guessed."""
        return 1.0 - 1.0 / sum(self._runs()[:: num_drafts + 1])

    def rounds(self, num_drafts: int, num_tokens: float) -> float:
        """Return the mean rounds of a text; its last one is cut short by the text's end.

        What the last round would have had beyond the end is the mean overshoot of a renewal
        process: (E[X^2] - E[X]) / (2 E[X]) for X tokens per round.
        """
        runs, width = self._runs(), num_drafts + 1
        mean = self.tokens_per_round(num_drafts)
        squares = sum((2 * (a % width) + 1) * s for a, s in enumerate(runs)) / sum(runs[::width])
        beyond = (squares - mean) / (2.0 * mean)
        return max(1.0, (num_tokens + beyond) / mean)

    def _runs(self) -> list[float]:
        """Return the survival of every length that matters."""
        runs = [s for s in self.survival if s > _NEGLIGIBLE][:MOST_TOKENS]
        while len(runs) < MOST_TOKENS and runs[-1] * self.tail > _NEGLIGIBLE:
            runs.append(runs[-1] * self.tail)
        return runs
