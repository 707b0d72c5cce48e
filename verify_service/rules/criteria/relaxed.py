"""Relaxed acceptance: accept a mismatch that is nearly as likely as the target's best token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flyspec.engine.logits import computable
from flyspec.rules import Rule
from verify_service.rules.criteria import Criterion, Evidence


@dataclass(frozen=True, slots=True)
class Relaxed(Criterion):
    """Among the k most likely tokens, and p(x) >= p(top) - δ or p(x) >= r p(top).

    TensorRT-LLM's relaxed acceptance for thinking (pull request 3865; k and δ), and ATOM's form (r,
    pull request 411). p is the processed distribution. Tokens as likely as the k-th count, too.
    """

    top_k: int
    delta: float
    ratio: float

    def measure(self, at: Evidence) -> Tensor:
        """Return p(x), p(top), and the number of tokens that are likelier than x: [n, 3]."""
        logits = at.processed
        drafted = logits.gather(-1, at.token_ids[:, None])
        likelier = (logits > drafted).sum(dim=-1, keepdim=True)
        p = torch.softmax(computable(logits), dim=-1)
        chosen = p.gather(-1, at.token_ids[:, None])
        return torch.cat([chosen, p.amax(dim=-1, keepdim=True), likelier.to(p.dtype)], dim=-1)

    def accepts(self, *numbers: float) -> bool:
        drafted, top, likelier = numbers
        near = drafted >= top - self.delta or drafted >= self.ratio * top
        return likelier < self.top_k and near


def relaxed(rule: Rule) -> Criterion:
    assert rule.relaxed_top_k is not None
    assert rule.relaxed_delta is not None
    assert rule.relaxed_ratio is not None
    return Relaxed(rule.relaxed_top_k, rule.relaxed_delta, rule.relaxed_ratio)
