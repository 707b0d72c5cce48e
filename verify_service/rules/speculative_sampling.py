"""The rule `rejection` at temperature > 0: lossless speculative sampling.

A draft x ~ q is accepted with probability min(1, p(x) / q(x)); otherwise the token is drawn from
the normalised positive part of p - q. The result follows p exactly for any q (Leviathan et al.,
arXiv 2211.17192, section 2.3 and theorem 1; Chen et al., arXiv 2302.01318). q must be the
distribution that x was actually drawn from, and draft, acceptance and residual use separate noise
streams. Unlike with keyed matching, the text depends on the drafter.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from flyspec.engine.distributions import Distributions
from flyspec.engine.logits import computable
from flyspec.engine.sampling import (
    ACCEPT_STREAM,
    RESIDUAL_STREAM,
    TARGET_STREAM,
    checked,
    sample,
    uniform,
)
from flyspec.values.rounds import Decision, Outcome
from verify_service.rules.criteria import Evidence, Measure
from verify_service.rules.inquiry import Answers, Inquiry, Round
from verify_service.rules.observe import THREE_LOGITS
from verify_service.rules.window import RoundEnd


class Chance(Measure):
    """Whether a draft is accepted: `acceptance_ratio`, and a uniform random number."""

    needs_draft = True

    def measure(self, at: Evidence) -> Tensor:
        """Return both, float64 [n, 2]."""
        u = uniform(at.positions, at.seed, ACCEPT_STREAM, at.raw.device)
        return torch.stack([acceptance_ratio(at).to(torch.float64), u], dim=-1)


class Correction(Measure):
    """The token in place of a rejected draft, drawn from the residual."""

    needs_draft = True

    def measure(self, at: Evidence) -> Tensor:
        """Return the tokens, or `NOT_FINITE`: int64 [n, 1]."""
        assert at.draft is not None
        weights = residual_log_weights(at.processed, at.draft)
        return sample(weights, at.positions, at.seed, RESIDUAL_STREAM)[:, None]


CHANCE, CORRECTION = Chance(), Correction()
_ASKED = (THREE_LOGITS, CHANCE, CORRECTION)


def inquire_sampling(round_: Round) -> Inquiry:
    """Return what speculative sampling needs to know of a round."""
    return Inquiry(round_, (TARGET_STREAM,), _ASKED)


def speculative_sampling(round_: Round, answers: Answers, exact_until: int) -> RoundEnd:
    """Accept the drafts in order, each with probability min(1, p / q).

    Accepted drafts are EXACT and cost nothing; guards and budgets do not apply. The first rejected
    one is replaced by a draw from the residual. Indices before `exact_until` are judged by match
    with the target's keyed sample.
    """
    drafts = round_.drafts
    count = len(drafts)
    exact = min(count, max(0, exact_until))
    # The target's own sample is needed only before `exact_until` and for the bonus token.
    own = answers.tokens(TARGET_STREAM, 0, exact)
    (bonus,) = answers.tokens(TARGET_STREAM, count, count + 1)
    logits_at, chance_at, correction_at = (partial(answers.numbers, i) for i in range(3))
    decisions: list[Decision] = []
    for index, draft in enumerate(drafts):
        ratio = None
        if index < exact:
            accepted = draft == own[index]
        else:
            ratio, u = chance_at(index)
            accepted = stands(ratio, u)
        if accepted:
            decisions.append(Decision(Outcome.EXACT, draft, measure=ratio))
            continue
        token = own[index] if index < exact else checked(correction_at(index))[0]
        most, drafted, _ = logits_at(index)
        decisions.append(Decision(Outcome.REJECTED, token, gap_nats=most - drafted, measure=ratio))
        return RoundEnd(decisions, token, rejected=True)
    return RoundEnd(decisions, bonus)


def acceptance_ratio(at: Evidence) -> Tensor:
    """Return p(x) / q(x) of the drafted tokens, with the processed p: [n].

    0 where p(x) is 0; infinite where the drafter could not have drawn the token.
    """
    assert at.draft is not None
    log_p = computable(at.processed).log_softmax(dim=-1)
    token_ids = at.token_ids[:, None]
    log_q = at.draft.log_probs.to(log_p.dtype)
    if at.draft.token_ids is None:
        drafted = log_q.gather(-1, token_ids)
    else:
        # Padding repeats ids with -inf, which the maximum ignores.
        same = at.draft.token_ids == token_ids
        drafted = torch.where(same, log_q, -torch.inf).amax(dim=-1, keepdim=True)
    log_p = log_p.gather(-1, token_ids)
    ratio: Tensor = torch.where(log_p > -torch.inf, (log_p - drafted).exp(), 0.0)[:, 0]
    return ratio


def stands(ratio: float, u: float) -> bool:
    """Return whether a draft is accepted, u uniform in (0, 1)."""
    return u < ratio


def residual_log_weights(logits: Tensor, draft: Distributions) -> Tensor:
    """Return log of the positive part of p - q, not normalised, [n, V]; p = softmax of logits.

    A row without a positive entry is log p: rounding can leave a rejected draft without residual
    when p and q are equal.
    """
    p = torch.softmax(computable(logits), dim=-1)
    q = draft.log_probs.to(p.dtype).exp()
    left = p - q if draft.token_ids is None else p.scatter_add(-1, draft.token_ids, -q)
    left = left.clamp_(min=0.0)
    empty = left.amax(dim=-1, keepdim=True) <= 0.0
    return torch.where(empty, p, left).log()
