"""Criteria on what the target says of a mismatch: its logits, or its hidden row.

Among them FLy's gate, the entropy of an unsure target, and the control, which asks nobody.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flyspec.engine.autojudge import AutoJudge
from flyspec.engine.logits import computable
from flyspec.engine.sampling import ACCEPT_STREAM, uniform
from flyspec.errors import InvalidArgumentError
from flyspec.rules import EntropyMeasure, Rule
from flyspec.rules.presets import RULE_PRESETS
from verify_service.rules.criteria import Constant, Criterion, Evidence

REFERENCE_GATE_OFF = 0.01
"""FLy's released code, which uses raw logits, disables its gate at thresholds up to this."""


def normalized_entropy(logits: Tensor) -> Tensor:
    """Return H(p) / log|V|, in [0, 1] (FLy, arXiv 2511.22972, equation 5). 0 log 0 = 0."""
    entropy: Tensor = torch.special.entr(torch.softmax(computable(logits), dim=-1)).sum(dim=-1)
    return (entropy.clamp_(min=0.0) / math.log(max(2, logits.shape[-1]))).clamp_(max=1.0)


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


@dataclass(frozen=True, slots=True)
class Importance(Criterion):
    """P(important) of the target's hidden row after the drafted token, at most a threshold.

    AutoJudge (arXiv 2504.20039). The row is computed as if all drafts before it stood, which is
    what holds where the criterion is asked.
    """

    judge: AutoJudge
    threshold: float

    needs_hidden = True

    def measure(self, at: Evidence) -> Tensor:
        """Return the probability, float64 [n, 1]; NaN, which is not accepted, of such a row."""
        assert at.hidden is not None
        return self.judge.importance(at.hidden)[:, None]

    def accepts(self, *numbers: float) -> bool:
        return numbers[0] <= self.threshold


def importance(rule: Rule, judge: AutoJudge | None) -> Criterion:
    """Return a rule's criterion; no probability of a regression is 0.

    Raises `InvalidArgumentError` without a judge.
    """
    if judge is None:
        raise InvalidArgumentError(
            f"rule.name: the rule {rule.name!r} needs a judge, and this target has none; start the "
            "verify service with --autojudge-file, or use another rule"
        )
    threshold = judge.facts.threshold if rule.judge_threshold is None else rule.judge_threshold
    return Importance(judge, threshold) if threshold > 0.0 else Constant(False)


@dataclass(frozen=True, slots=True)
class Random(Criterion):
    """Accepts a mismatch with a given probability: if u < p, u uniform, keyed by seed and position.

    The baseline of Fuzzy Speculative Decoding, appendix E, which a worthwhile rule must beat. Its
    released code tests every draft: `judges_matches`.
    """

    probability: float
    judges_matches: bool = False

    def measure(self, at: Evidence) -> Tensor:
        """Return the random number, float64 in (0, 1); per position the same for all drafters."""
        return uniform(at.positions, at.seed, ACCEPT_STREAM, at.raw.device)[:, None]

    def accepts(self, *numbers: float) -> bool:
        return numbers[0] < self.probability


def random_control(rule: Rule) -> Criterion:
    probability, judges_matches = rule.random_acceptance, bool(rule.random_judges_matches)
    if not probability and not judges_matches:
        return Constant(False)
    return Random(probability or 0.0, judges_matches)
