"""Constrained acceptance: raise the drafted token's probability within a divergence budget."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flyspec.rules import Rule
from verify_service.rules.criteria import Evidence, Loosening


@dataclass(frozen=True)
class Cactus(Loosening):
    """Compare a draft x with h: h(x) = min(1, p(x) + sqrt(2 δ p(x) (1 - p(x)))), others scaled.

    Cactus (arXiv 2604.04987): among distributions whose divergence from p is about δ, the one with
    the largest h(x). The others are multiplied by (1 - h(x)) / (1 - p(x)), so that h sums to 1.
    """

    delta: float

    def ratio(self, at: Evidence, exact: Tensor) -> Tensor:
        assert at.draft is not None
        q = at.draft.log_probs_of(at.token_ids).to(exact.dtype).exp()
        # Without q there is no p to raise: the ratio stays infinite.
        return torch.where(q > 0.0, self._raised((exact * q).clamp(max=1.0)) / q, exact)

    def target(self, at: Evidence, p: Tensor) -> Tensor:
        token_ids = at.token_ids[:, None]
        drafted = p.gather(-1, token_ids)
        raised = self._raised(drafted)
        # A token of probability 1 leaves the others at 0, whatever the factor.
        factor = torch.where(drafted < 1.0, (1.0 - raised) / (1.0 - drafted), 1.0)
        return (p * factor).scatter(-1, token_ids, raised)

    def _raised(self, p: Tensor) -> Tensor:
        return (p + (2.0 * self.delta * p * (1.0 - p)).sqrt()).clamp(max=1.0)


def cactus(rule: Rule) -> Loosening:
    assert rule.cactus_delta is not None
    return Cactus(rule.cactus_delta)
