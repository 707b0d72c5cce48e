"""FLy's gate: accept a mismatch where the target itself is unsure, entropy >= θ."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flyspec.engine.logits import computable
from flyspec.rules import EntropyMeasure, Rule
from flyspec.rules.presets import RULE_PRESETS
from verify_service.rules.criteria import Constant, Criterion, Evidence

REFERENCE_GATE_OFF = 0.01
"""FLy's released code, which uses raw logits, disables its gate at thresholds up to this."""


def entropy_nats(logits: Tensor) -> Tensor:
    """Return H(p) = -sum of p log p over the vocabulary, nats: [rows]. 0 log 0 = 0."""
    entropy: Tensor = torch.special.entr(torch.softmax(computable(logits), dim=-1)).sum(dim=-1)
    return entropy.clamp_(min=0.0)


def normalized_entropy(logits: Tensor) -> Tensor:
    """Return H(p) / log|V|, in [0, 1] (FLy, arXiv 2511.22972, equation 5)."""
    return (entropy_nats(logits) / math.log(max(2, logits.shape[-1]))).clamp_(max=1.0)


def top_k_entropy(logits: Tensor, k: int) -> Tensor:
    """Return -sum of p log p over the k most likely tokens, in nats, p not renormalised.

    FLy's released code and vLLM compute it this way, both with k = 3.
    """
    scores = computable(logits)
    top = scores.topk(min(k, scores.shape[-1]), dim=-1).values
    probabilities = (top - scores.logsumexp(dim=-1, keepdim=True)).exp_()
    entropy: Tensor = torch.special.entr(probabilities).sum(dim=-1)
    return entropy.clamp_(min=0.0)


@dataclass(frozen=True, slots=True)
class Entropy(Criterion):
    """Entropy at or above a threshold (arXiv 2511.22972, Algorithm 1: the entropy-level gate)."""

    threshold: float
    top_k: int | None = None  # None: the normalized measure
    raw: bool = False  # of raw instead of processed logits

    entropy = True

    def measure(self, at: Evidence) -> Tensor:
        """Return the entropy, in the measure's unit."""
        logits = at.raw if self.raw else at.processed
        if self.top_k is None:
            return normalized_entropy(logits)[:, None]
        return top_k_entropy(logits, self.top_k)[:, None]

    def accepts(self, *numbers: float) -> bool:
        return numbers[0] >= self.threshold


def entropy_gate(rule: Rule) -> Criterion:
    """Return a rule's gate; at 1 the normalized gate is closed regardless of rounding."""
    threshold, raw = rule.fly_entropy_threshold, RULE_PRESETS[rule.name].raw
    assert threshold is not None
    if raw and threshold <= REFERENCE_GATE_OFF:
        return Constant(True)
    if rule.entropy_measure is EntropyMeasure.NORMALIZED:
        return Constant(False) if threshold >= 1.0 else Entropy(threshold, None, raw)
    return Entropy(threshold, rule.fly_entropy_top_k, raw)
