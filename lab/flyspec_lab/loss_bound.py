"""Fuzzy speculative decoding's bound on what a score can lose: N·%M_D·T (arXiv 2502.20704).

Given the tokens before it, a token that the draft model supplied has the draft's distribution,
which is within T of the target's in total variation; any other token has the target's own. Over a
text these add up, so that the distributions of texts, and with them the means of any score from 0
to 1, differ by at most T times the expected number of the draft's tokens: N tokens, a share %M_D of
them.

That holds where

- the rule compares total variations: a JS or KL below T leaves a total variation of up to √(2T) or
  √(T/2) (Pinsker), far more than T;
- tokens are sampled from the very distributions that are compared (temperature above 0), and what
  is rejected is replaced by a sample of the target. Greedy decoding replaces distributions by their
  most likely tokens, which may differ however close the distributions are;
- there is no window, which makes a token depend on those after it.

Two things are left out of account. With `divergence_top_k`, what differs among the tokens in the
last bucket does not count towards T. And a control token is never accepted loosely, which may add
the probability that one of both models, but not the other, ends the text there.
"""

from __future__ import annotations

from dataclasses import dataclass

from flyspec.rules import Divergence, Rule
from flyspec.rules.presets import RULE_PRESETS


@dataclass(frozen=True)
class LossBound:
    """The bound of a rule: `tokens` (N) is a text's expected length, `draft_share` is %M_D."""

    tokens: float
    draft_share: float
    threshold: float

    @property
    def value(self) -> float:
        """The largest loss of a mean score; above 1 it says nothing."""
        return self.tokens * self.draft_share * self.threshold

    def __str__(self) -> str:
        return f"{self.value:.2f}" + (", says nothing" if self.value >= 1.0 else "")


def loss_bound(rule: Rule, tokens: float, draft_share: float) -> LossBound | None:
    """Return a resolved rule's bound for sampled texts, None if none holds.

    `tokens` per text, of which the share `draft_share` was drafted and accepted.
    """
    preset = RULE_PRESETS.get(rule.name)
    if (
        preset is None
        or preset.criterion not in ("divergence", "reversed divergence")
        or rule.divergence is not Divergence.TV
        or rule.fly_window_size
    ):
        return None
    return LossBound(tokens, draft_share, rule.divergence_threshold or 0.0)
