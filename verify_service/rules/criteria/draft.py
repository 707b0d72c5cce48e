"""Criteria on the draft's distribution beside the target's, and loosenings of their ratio.

Fuzzy speculative decoding accepts a mismatch where both hardly differ. The target's p and the
draft's q are compared over the whole vocabulary, or over some tokens and one bucket for all others.
Everything is in nats and log-probabilities, so that float32 suffices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flyspec.engine.distributions import Distributions
from flyspec.engine.logits import computable
from flyspec.rules import Divergence, Rule
from verify_service.rules.criteria import Constant, Criterion, Evidence, Loosening

HALF_FLOAT_ROUNDING = 2.0**-11
"""Maximum relative error of rounding to a half float."""


def kl(a: Tensor, b: Tensor) -> Tensor:
    """Return KL(a || b) = sum of a log(a / b) of log-probabilities [n, m]: [n]. 0 log 0 = 0."""
    weight = a.exp()
    return torch.where(weight > 0, weight * (a - b), 0.0).sum(dim=-1)


def _middle(log_p: Tensor, log_q: Tensor) -> Tensor:
    return torch.logaddexp(log_p, log_q) - math.log(2)


def jensen_shannon(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2; at most ln 2."""
    log_m = _middle(log_p, log_q)
    return (kl(log_p, log_m) + kl(log_q, log_m)) / 2


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return half the sum of |p - q|; at most 1."""
    return (log_p.exp() - log_q.exp()).abs().sum(dim=-1) / 2


def reversed_jensen_shannon(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return (KL(m || p) + KL(m || q)) / 2, which the released code calls JS; unbounded."""
    log_m = _middle(log_p, log_q)
    return (kl(log_m, log_p) + kl(log_m, log_q)) / 2


def reversed_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(q || p), which the released code calls KL."""
    return kl(log_q, log_p)


FORMULAS: dict[Divergence, Callable[[Tensor, Tensor], Tensor]] = {
    Divergence.JS: jensen_shannon,
    Divergence.KL: kl,
    Divergence.TV: total_variation,
}
REVERSED_FORMULAS: dict[Divergence, Callable[[Tensor, Tensor], Tensor]] = {
    Divergence.JS: reversed_jensen_shannon,
    Divergence.KL: reversed_kl,
    Divergence.TV: total_variation,  # symmetric
}


def comparable(logits: Tensor, draft: Distributions, top_k: int) -> tuple[Tensor, Tensor]:
    """Return log p and log q over the same outcomes, [n, m] each; p = softmax of logits [n, V].

    If the draft's distribution is whole, the outcomes are the vocabulary, or for `top_k` > 0 the
    target's `top_k` most likely tokens and one bucket for the rest. If it lists only some tokens,
    they are those and one bucket. q is used as sent. Grouping tokens never increases a divergence.
    """
    log_p = computable(logits).log_softmax(dim=-1)
    log_q = draft.log_probs.to(log_p.dtype)
    if draft.token_ids is not None:
        return _over_listed(log_p, log_q, draft.token_ids)
    if 0 < top_k < log_p.shape[-1]:
        top = log_p.topk(top_k, dim=-1).indices
        return _with_rest(log_p, top), _with_rest(log_q, top)
    return log_p, log_q


def _with_rest(log_probs: Tensor, token_ids: Tensor) -> Tensor:
    """Return log-probabilities of these tokens [n, k] and of all others together: [n, k + 1]."""
    others = log_probs.scatter(-1, token_ids, -torch.inf).logsumexp(dim=-1, keepdim=True)
    return torch.cat([log_probs.gather(-1, token_ids), others], dim=-1)


def _over_listed(log_p: Tensor, log_q: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return log p and log q over the tokens that the draft lists, [n, k + 1] each.

    Entries of probability 0 count as padding: their p goes with the rest. The rest of q is 1 minus
    its entries, but no less than what their rounding may hide: half floats that happen to add up to
    1 must not make all other tokens impossible. A point mass leaves no rest.
    """
    listed = log_q > -torch.inf
    mark = torch.where(listed, -torch.inf, torch.inf).to(log_p.dtype)
    # amin: an id that is listed once and repeated as padding counts as listed.
    others = log_p.scatter_reduce(-1, token_ids, mark, "amin").logsumexp(dim=-1, keepdim=True)
    own = torch.where(listed, log_p.gather(-1, token_ids), -torch.inf)
    q = log_q.exp()
    left = 1.0 - q.sum(dim=-1, keepdim=True)
    hidden = torch.special.entr(q).sum(dim=-1, keepdim=True) * HALF_FLOAT_ROUNDING
    rest = torch.maximum(left, hidden).log()
    return torch.cat([own, others], dim=-1), torch.cat([log_q, rest], dim=-1)


@dataclass(frozen=True, slots=True)
class DivergenceBelow(Criterion):
    """A divergence of p and q below T (Fuzzy Speculative Decoding, arXiv 2502.20704, appendix A).

    p is the target's processed distribution, q the draft's. The token itself does not matter, only
    that the draft was close to the target where it drew the token.
    """

    divergence: Divergence
    threshold: float
    top_k: int = 0

    needs_draft = True

    def measure(self, at: Evidence) -> Tensor:
        """Return the divergence, nats (TV: none), >= 0; KL: infinite where q lacks a token of p."""
        assert at.draft is not None
        value = FORMULAS[self.divergence](*comparable(at.processed, at.draft, self.top_k))
        return value.clamp_(min=0.0)[:, None]

    def accepts(self, *numbers: float) -> bool:
        return numbers[0] < self.threshold


@dataclass(frozen=True, slots=True)
class ReversedDivergence(DivergenceBelow):
    """The divergence of Fuzzy Speculative Decoding's released code, at most T.

    The code's formulas are reversed, and its thresholds (0.3 to 0.7) are for those. It uses raw
    logits and tests every drafted token, including the target's own. Its `top_k_*` forms compare
    whole distributions over the target's 50 most likely tokens and one bucket for the rest.
    """

    judges_matches = True

    def measure(self, at: Evidence) -> Tensor:
        """Return the divergence, nats, >= 0; infinite where q or p lacks a token of the other."""
        assert at.draft is not None
        value = REVERSED_FORMULAS[self.divergence](*comparable(at.raw, at.draft, self.top_k))
        return value.clamp_(min=0.0)[:, None]

    def accepts(self, *numbers: float) -> bool:
        return numbers[0] <= self.threshold


@dataclass(frozen=True, slots=True)
class DivergenceIfUnsure(DivergenceBelow):
    """A divergence below T where the target is unsure; where it is confident, nothing is accepted.

    Judge decoding without training (arXiv 2601.04766): KL(p || q) < T where no token has more than
    0.9 of the target's probability, as its released code (sunshy-1/JuDi) computes it.
    """

    confidence: float = 0.9

    def measure(self, at: Evidence) -> Tensor:
        """Return the divergence, as `DivergenceBelow`, and the largest probability: [n, 2]."""
        found = DivergenceBelow.measure(self, at)
        top = torch.softmax(computable(at.processed), dim=-1).amax(dim=-1, keepdim=True)
        return torch.cat([found, top.to(found.dtype)], dim=-1)

    def accepts(self, *numbers: float) -> bool:
        divergence, top = numbers
        return top <= self.confidence and divergence < self.threshold


def divergence_below(rule: Rule) -> Criterion:
    """Return a rule's criterion; nothing is below a threshold of 0."""
    if not rule.divergence_threshold:
        return Constant(False)
    assert rule.divergence is not None
    return DivergenceBelow(rule.divergence, rule.divergence_threshold, rule.divergence_top_k or 0)


def reversed_divergence(rule: Rule) -> Criterion:
    kind, threshold = rule.divergence, rule.divergence_threshold
    assert kind is not None
    assert threshold is not None
    return ReversedDivergence(kind, threshold, rule.divergence_top_k or 0)


def divergence_if_unsure(rule: Rule) -> Criterion:
    """Return a rule's criterion; nothing is below a threshold of 0."""
    if not rule.divergence_threshold:
        return Constant(False)
    assert rule.divergence is not None
    assert rule.confidence_threshold is not None
    return DivergenceIfUnsure(
        rule.divergence,
        rule.divergence_threshold,
        rule.divergence_top_k or 0,
        rule.confidence_threshold,
    )


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
