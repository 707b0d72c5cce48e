"""Margin-aware verification: accept the target's runner-up where two raw logits are near."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flyspec.rules import Rule
from verify_service.rules.criteria import Constant, Criterion, Evidence


@dataclass(frozen=True, slots=True)
class Mars(Criterion):
    """The drafted token is the target's first or second choice, and z(x) / z(top) > θ, raw logits.

    MARS (arXiv 2601.15498, section 3). A ratio of logits is not invariant to adding a constant to
    all of them, which changes no probability. Where the largest logit is not positive, the formula
    would accept any runner-up (of -2 and -1 the ratio is 2); here nothing is accepted there.
    """

    ratio: float

    def measure(self, at: Evidence) -> Tensor:
        """Return the ratio, 0 where it has no meaning, and the number of larger logits: [n, 2].

        Float64, since the ratio of two equal logits must be exactly 1.
        """
        drafted = at.raw.gather(-1, at.token_ids[:, None])
        larger = (at.raw > drafted).sum(dim=-1, keepdim=True).to(torch.float64)
        top = at.raw.amax(dim=-1, keepdim=True).to(torch.float64)
        ratio = torch.where(top > 0.0, drafted.to(torch.float64) / top, 0.0)
        return torch.cat([ratio, larger], dim=-1)

    def accepts(self, *numbers: float) -> bool:
        ratio, larger = numbers
        return larger <= 1 and ratio > self.ratio


def mars(rule: Rule) -> Criterion:
    """Return a rule's criterion; no ratio exceeds 1."""
    assert rule.mars_ratio is not None
    return Constant(False) if rule.mars_ratio >= 1.0 else Mars(rule.mars_ratio)
