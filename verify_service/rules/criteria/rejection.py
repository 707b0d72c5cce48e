"""Speculative sampling's two numbers: the ratio p / q of a draft, and what is left of p without q.

A draft x ~ q stands with probability min(1, p(x) / q(x)); else the token is drawn from the
normalised positive part of p - q. Then it follows p exactly, whatever q is (Leviathan et al.,
arXiv 2211.17192, section 2.3 and theorem 1; Chen et al., arXiv 2302.01318). q must be the
distribution that x was really drawn from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flyspec.engine.distributions import Distributions
from verify_service.rules.criteria import Evidence, computable


def acceptance_ratio(at: Evidence) -> Tensor:
    """p(x) / q(x) of the drafted tokens, of the processed p: [n].

    0 where p(x) is 0; infinite where the drafter names a token that it could not have drawn.
    """
    assert at.draft is not None
    log_p = computable(at.processed).log_softmax(dim=-1)
    token_ids = at.token_ids[:, None]
    log_q = at.draft.log_probs.to(log_p.dtype)
    if at.draft.token_ids is None:
        drafted = log_q.gather(-1, token_ids)
    else:
        # Padding repeats ids with -inf, which the maximum leaves out.
        same = at.draft.token_ids == token_ids
        drafted = torch.where(same, log_q, -torch.inf).amax(dim=-1, keepdim=True)
    log_p = log_p.gather(-1, token_ids)
    ratio: Tensor = torch.where(log_p > -torch.inf, (log_p - drafted).exp(), 0.0)[:, 0]
    return ratio


def stands(ratio: float, u: float) -> bool:
    """Whether a draft stands, u uniform in (0, 1)."""
    return u < ratio


def residual_log_weights(logits: Tensor, draft: Distributions) -> Tensor:
    """log of the positive part of p - q, not normalised, [n, V]; p = softmax of logits [n, V].

    log p in a row where nothing is positive: rounding can leave a rejected draft without residual
    when p and q are equal.
    """
    p = torch.softmax(computable(logits), dim=-1)
    q = draft.log_probs.to(p.dtype).exp()
    left = p - q if draft.token_ids is None else p.scatter_add(-1, draft.token_ids, -q)
    left = left.clamp_(min=0.0)
    empty = left.amax(dim=-1, keepdim=True) <= 0.0
    return torch.where(empty, p, left).log()
