"""Observations of a round in the target's logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flyspec.engine.sampling import TARGET_STREAM
from verify_service.rules.criteria import Evidence, Measure
from verify_service.rules.inquiry import Answers, Inquiry


class ThreeLogits(Measure):
    """The largest raw logit, the drafted token's, and its processed one."""

    def measure(self, at: Evidence) -> Tensor:
        """Return them, float64 [n, 3]; the gap of the first two is Δlogp."""
        token_ids = at.token_ids[:, None]
        logits = (
            at.raw.amax(dim=-1, keepdim=True),
            at.raw.gather(-1, token_ids),
            at.processed.gather(-1, token_ids),
        )
        return torch.cat([logit.to(torch.float64) for logit in logits], dim=-1)


THREE_LOGITS = ThreeLogits()


@dataclass(frozen=True, slots=True)
class Observed:
    """Facts about a round of K drafted tokens, by index from 0.

    `own` has the target's own token at each of the K + 1 positions; `matches` is in the sense of
    each position's rule.
    """

    own: list[int]
    matches: list[bool]
    _inquiry: Inquiry
    _answers: Answers

    def numbers(self, measure: Measure, index: int) -> Sequence[float]:
        """Return what one of the inquiry's measures found at an index."""
        return self._answers.numbers(self._inquiry.measures.index(measure), index)

    def gap(self, index: int) -> float:
        """Return raw logp(most likely) - logp(drafted), nats; infinite for probability 0."""
        most, drafted, _ = self._answers.numbers(0, index)
        return most - drafted

    def possible(self, index: int) -> bool:
        """True if the drafted token's processed probability is not 0."""
        return self._answers.numbers(0, index)[2] != -math.inf


def observe(inquiry: Inquiry, answers: Answers, samples: Sequence[int]) -> Observed:
    """Return the facts that the answers to an inquiry give.

    `samples` is how many of the target's samples a draft may match, for each draft.
    """
    drafts = inquiry.round.drafts
    width = len(drafts) + 1
    own = answers.tokens(TARGET_STREAM, 0, width)
    matches = [draft == token for draft, token in zip(drafts, own, strict=False)]
    for number, stream in enumerate(inquiry.streams[1:], 2):
        tokens = answers.tokens(stream, 0, width)
        matches = [
            m or (d == t and count >= number)
            for m, d, t, count in zip(matches, drafts, tokens, samples, strict=False)
        ]
    return Observed(own, matches, inquiry, answers)
