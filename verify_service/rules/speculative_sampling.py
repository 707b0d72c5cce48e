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
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flyspec.engine.distributions import Distributions
from flyspec.engine.logits import computable
from flyspec.engine.sampling import (
    ACCEPT_STREAM,
    RESIDUAL_STREAM,
    checked,
    sample,
    uniform,
)
from flyspec.values.rounds import Decision, Outcome
from verify_service.rules.criteria import Evidence, Loosening, Measure
from verify_service.rules.guard import Guard, Purse
from verify_service.rules.inquiry import THREE_LOGITS, Answers, Round
from verify_service.rules.window import WindowWalk


@dataclass(frozen=True)
class Chance(Measure):
    """True if a draft is accepted: `acceptance_ratio`, a random number, and the loosened ratio."""

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


@dataclass(frozen=True, slots=True)
class SamplingReferee:
    """Accepts each draft with probability min(1, p / q), or as a rule loosens it.

    Drafts accepted either way are EXACT and cost nothing. Those that only the loosened ratio lets
    pass are LOOSE, and need the leave of guard and purse, and that no window is open. A rejected
    one is replaced by a draw from the residual, the loosened one if the draft could have been
    accepted loosely. Indices before `exact_until`, and those of bonus tokens, are judged by match
    with the target's keyed sample. `own` has the target's own tokens by index; elsewhere they are
    needed only for guards.
    """

    round: Round
    answers: Answers
    own: Sequence[int]
    loosening: Loosening | None
    window: WindowWalk
    guard: Guard
    purse: Purse
    exact_until: int

    def decide(self, index: int) -> Decision:
        """Return EXACT, LOOSE (paid for) or REJECTED, with the token that replaces the draft."""
        draft = self.round.drafts[index]
        most, drafted, processed = self.answers.numbers(THREE_LOGITS, index)
        gap = most - drafted
        if index < self.exact_until or self.window.is_bonus(index):
            own = self.own[index]
            if draft == own:
                return Decision(Outcome.EXACT, draft)
            return Decision(Outcome.REJECTED, own, gap_nats=gap)
        ratio, u, *loosened = self.answers.numbers(Chance(self.loosening), index)
        if u < ratio:
            return Decision(Outcome.EXACT, draft, measure=ratio)
        loosely = self._may_be_loose(index, gap, processed)
        if loosely:
            (ratio,) = loosened
            if u < ratio:
                self.purse.pay(gap)
                own = self.own[index]
                return Decision(Outcome.LOOSE, own, gap_nats=gap, measure=ratio)
        token = checked(self.answers.numbers(Correction(self.loosening), index))[loosely]
        return Decision(Outcome.REJECTED, token, gap_nats=gap, measure=ratio)

    def _may_be_loose(self, index: int, gap_nats: float, processed: float) -> bool:
        return (
            self.loosening is not None
            and processed > -math.inf
            and not self.window.is_open
            and self.guard.allows(self.round.drafts[index], self.own[index])
            and self.purse.affords(gap_nats)
        )


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
