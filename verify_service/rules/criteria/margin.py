"""Log-prob margin: a mismatch may stand where the target likes its own favourite hardly better."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flyspec.rules import Rule
from verify_service.rules.criteria import Constant, Criterion, Evidence


@dataclass(frozen=True, slots=True)
class Margin(Criterion):
    """ΔlogP = log p(most likely token) - log p(drafted token) below τ, nats.

    The variant of FLy that a discussion of llama.cpp proposes. p is the processed distribution. The
    normalisation cancels, so two logits tell it, without rounding.
    """

    threshold: float

    def measure(self, at: Evidence) -> Tensor:
        """The margin, nats, >= 0; infinite for a token of probability 0."""
        drafted = at.processed.gather(-1, at.token_ids[:, None]).to(torch.float64)
        return at.processed.amax(dim=-1, keepdim=True).to(torch.float64) - drafted

    def accepts(self, *numbers: float) -> bool:
        """Whether the margin is small enough; equality is not."""
        return numbers[0] < self.threshold


def margin(rule: Rule) -> Criterion:
    """The criterion of a rule; no margin is below 0."""
    return Margin(rule.margin_threshold) if rule.margin_threshold else Constant(False)
