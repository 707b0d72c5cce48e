"""Typical acceptance: accept a mismatch if it is likely enough or the target unsure enough."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flyspec.engine.logits import computable
from flyspec.rules import Rule
from verify_service.rules.criteria import Criterion, Evidence


@dataclass(frozen=True, slots=True)
class Typical(Criterion):
    """p(x) > min(ε, δ exp(-H(p))), H over the whole vocabulary in nats.

    Medusa's typical acceptance (arXiv 2401.10774), after η-sampling's bound (arXiv 2210.15191). p
    is the processed distribution. Here the target's own token is always accepted.
    """

    epsilon: float
    delta: float

    def measure(self, at: Evidence) -> Tensor:
        """Return the drafted token's probability and the entropy, nats: [n, 2]."""
        p = torch.softmax(computable(at.processed), dim=-1)
        drafted = p.gather(-1, at.token_ids[:, None])
        return torch.cat([drafted, torch.special.entr(p).sum(dim=-1, keepdim=True)], dim=-1)

    def accepts(self, *numbers: float) -> bool:
        probability, entropy = numbers
        return probability > min(self.epsilon, self.delta * math.exp(-entropy))


def typical(rule: Rule) -> Criterion:
    assert rule.typical_epsilon is not None
    assert rule.typical_delta is not None
    return Typical(rule.typical_epsilon, rule.typical_delta)
