"""Speculative sampling at temperature > 0: the rule `rejection`, lossless, and looser ones.

A draft x ~ q is accepted with probability min(1, p(x) / q(x)); otherwise the token is drawn from
the normalised positive part of p - q. The result follows p exactly for any q (Leviathan et al.,
arXiv 2211.17192, section 2.3 and theorem 1; Chen et al., arXiv 2302.01318). q must be the
distribution that x was actually drawn from, and draft, acceptance and residual use separate noise
streams. Unlike with keyed matching, the text depends on the drafter.

A loosened rule (`ensemble`, `cactus`) compares drafts with another distribution than p. The same
random number decides, so what `rejection` accepts is EXACT here, too, and the rest is LOOSE.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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
from verify_service.rules.criteria import Evidence, Loosening, Measure
from verify_service.rules.guard import Guard, Purse
from verify_service.rules.inquiry import Answers, Inquiry, Round
from verify_service.rules.observe import THREE_LOGITS
from verify_service.rules.window import RoundEnd


@dataclass(frozen=True)
class Chance(Measure):
    """Whether a draft is accepted: `acceptance_ratio`, a random number, and the loosened ratio."""

    loosening: Loosening | None = None

    needs_draft = True

    def measure(self, at: Evidence) -> Tensor:
        """Return them, float64 [n, 2], or [n, 3] with a loosening."""
        u = uniform(at.positions, at.seed, ACCEPT_STREAM, at.raw.device)
        exact = acceptance_ratio(at)
        columns = [exact.to(torch.float64), u]
        if self.loosening is not None:
            columns.append(self.loosening.ratio(at, exact).to(torch.float64))
        return torch.stack(columns, dim=-1)


@dataclass(frozen=True)
class Correction(Measure):
    """The token in place of a rejected draft, drawn from the residual; then from the loosened one.

    Both are drawn with the same noise.
    """

    loosening: Loosening | None = None

    needs_draft = True

    def measure(self, at: Evidence) -> Tensor:
        """Return the tokens, or `NOT_FINITE`: int64 [n, 1], or [n, 2] with a loosening."""
        assert at.draft is not None
        p = torch.softmax(computable(at.processed), dim=-1)
        targets = [p] if self.loosening is None else [p, self.loosening.target(at, p)]
        drawn = [
            sample(residual_log_weights(each, at.draft), at.positions, at.seed, RESIDUAL_STREAM)
            for each in targets
        ]
        return torch.stack(drawn, dim=-1)


def inquire_sampling(round_: Round, loosening: Loosening | None = None) -> Inquiry:
    """Return what speculative sampling needs to know of a round."""
    asked = (THREE_LOGITS, Chance(loosening), Correction(loosening))
    return Inquiry(round_, (TARGET_STREAM,), asked)


def speculative_sampling(
    round_: Round, answers: Answers, lenience: tuple[Guard, Purse] | None, exact_until: int
) -> RoundEnd:
    """Accept the drafts in order, each with probability min(1, p / q), or as a rule loosens it.

    Drafts accepted either way are EXACT and cost nothing. Those that only the loosened ratio lets
    pass are LOOSE, and need the leave of guard and purse (`lenience`; None if nothing is
    loosened). The first rejected one is replaced by a draw from the residual, the loosened one if
    the draft could have been accepted loosely. Indices before `exact_until` are judged by match
    with the target's keyed sample.
    """
    drafts = round_.drafts
    count = len(drafts)
    exact = min(count, max(0, exact_until))
    # Elsewhere the target's own sample is needed only for guards and as the bonus token.
    own = answers.tokens(TARGET_STREAM, 0, exact if lenience is None else count)
    (bonus,) = answers.tokens(TARGET_STREAM, count, count + 1)
    logits_at, chance_at, correction_at = (partial(answers.numbers, i) for i in range(3))
    decisions: list[Decision] = []
    for index, draft in enumerate(drafts):
        most, drafted, processed = logits_at(index)
        gap, ratio, loosely = most - drafted, None, False
        if index < exact:
            accepted = draft == own[index]
        else:
            ratio, u, *loosened = chance_at(index)
            accepted = stands(ratio, u)
            if lenience is not None and processed > -math.inf:
                guard, purse = lenience
                loosely = guard.allows(draft, own[index]) and purse.affords(gap)
            if loosely and not accepted:
                (ratio,) = loosened
                if stands(ratio, u):
                    purse.pay(gap)
                    decisions.append(
                        Decision(Outcome.LOOSE, own[index], gap_nats=gap, measure=ratio)
                    )
                    continue
        if accepted:
            decisions.append(Decision(Outcome.EXACT, draft, measure=ratio))
            continue
        token = own[index] if index < exact else checked(correction_at(index))[loosely]
        decisions.append(Decision(Outcome.REJECTED, token, gap_nats=gap, measure=ratio))
        return RoundEnd(decisions, token, rejected=True)
    return RoundEnd(decisions, bonus)


def acceptance_ratio(at: Evidence) -> Tensor:
    """Return p(x) / q(x) of the drafted tokens, with the processed p: [n].

    0 where p(x) is 0; infinite where the drafter could not have drawn the token.
    """
    assert at.draft is not None
    log_p = computable(at.processed).log_softmax(dim=-1)
    drafted = at.draft.log_probs_of(at.token_ids).to(log_p.dtype)
    log_p = log_p.gather(-1, at.token_ids[:, None])[:, 0]
    ratio: Tensor = torch.where(log_p > -torch.inf, (log_p - drafted).exp(), 0.0)
    return ratio


def stands(ratio: float, u: float) -> bool:
    """Return whether a draft is accepted, u uniform in (0, 1)."""
    return u < ratio


def residual_log_weights(p: Tensor, draft: Distributions) -> Tensor:
    """Return log of the positive part of p - q, not normalised: [n, V].

    A row without a positive entry is log p: rounding can leave a rejected draft without residual
    when p and q are equal.
    """
    q = draft.log_probs.to(p.dtype).exp()
    left = p - q if draft.token_ids is None else p.scatter_add(-1, draft.token_ids, -q)
    left = left.clamp_(min=0.0)
    empty = left.amax(dim=-1, keepdim=True) <= 0.0
    return torch.where(empty, p, left).log()
