"""Static ensemble verification: compare drafts with a mixture of target and draft."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flyspec.engine.logits import computable
from flyspec.rules import Rule
from verify_service.rules.criteria import Constant, Criterion, Evidence, Loosening


@dataclass(frozen=True, slots=True)
class EnsembleChoice(Criterion):
    """The drafted token is the most likely one of v = w p + (1 - w) q, with greedy decoding.

    Static ensembles (arXiv 2604.07622; transformers' `assistant_ensemble_weight`, which also puts
    v's choice in place of a rejected draft: here that is the target's own). A draft of which its
    drafter is certain, as prompt lookup always is, says nothing of v and is judged exactly.
    """

    weight: float

    needs_draft = True

    def measure(self, at: Evidence) -> Tensor:
        """Return v(top) - v(x), 0 for the choice, and q(x): [n, 2]."""
        assert at.draft is not None
        p = torch.softmax(computable(at.processed), dim=-1)
        q = at.draft.log_probs.to(p.dtype).exp() * (1.0 - self.weight)
        listed = at.draft.token_ids
        v = self.weight * p
        v = v + q if listed is None else v.scatter_add(-1, listed, q)
        drafted = v.gather(-1, at.token_ids[:, None])
        certain = at.draft.log_probs_of(at.token_ids).to(p.dtype).exp()[:, None]
        return torch.cat([v.amax(dim=-1, keepdim=True) - drafted, certain], dim=-1)

    def accepts(self, *numbers: float) -> bool:
        behind, q = numbers
        return behind <= 0.0 and q < 1.0


@dataclass(frozen=True)
class EnsembleRatio(Loosening):
    """v(x) / q(x) = 1 - w + w p(x) / q(x), where the drafter is not certain of x.

    The excess of v over q is w times that of p: the residual stays the same.
    """

    weight: float

    def ratio(self, at: Evidence, exact: Tensor) -> Tensor:
        assert at.draft is not None
        certain = at.draft.log_probs_of(at.token_ids) >= 0.0
        return torch.where(certain, exact, 1.0 - self.weight + self.weight * exact)


def ensemble_choice(rule: Rule) -> Criterion:
    """Return a rule's criterion; with a weight of 1 the target decides alone."""
    assert rule.ensemble_weight is not None
    return Constant(False) if rule.ensemble_weight == 1.0 else EnsembleChoice(rule.ensemble_weight)


def ensemble_ratio(rule: Rule) -> Loosening:
    assert rule.ensemble_weight is not None
    return EnsembleRatio(rule.ensemble_weight)
