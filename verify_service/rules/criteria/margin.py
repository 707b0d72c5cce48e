"""Log-probability margin: accept a mismatch where the target hardly prefers its own token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flyspec.rules import Rule
from verify_service.rules.criteria import Constant, Criterion, Evidence


@dataclass(frozen=True, slots=True)
class Margin(Criterion):
    """ΔlogP = log p(most likely token) - log p(drafted token) below τ, nats.

    The variant of FLy proposed in a discussion of llama.cpp. p is the processed distribution. The
    normalisation cancels, so that two logits suffice, without rounding.
    """

    threshold: float

    def measure(self, at: Evidence) -> Tensor:
        """Return the margin, nats, >= 0; infinite for a token of probability 0."""
        drafted = at.processed.gather(-1, at.token_ids[:, None]).to(torch.float64)
        return at.processed.amax(dim=-1, keepdim=True).to(torch.float64) - drafted

    def accepts(self, *numbers: float) -> bool:
        return numbers[0] < self.threshold


def margin(rule: Rule) -> Criterion:
    """Return a rule's criterion; no margin is below a threshold of 0."""
    return Margin(rule.margin_threshold) if rule.margin_threshold else Constant(False)
