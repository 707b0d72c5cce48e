"""The rule `rejection` at temperature > 0: drafts are accepted by chance, without any loss.

Draft, acceptance and residual have noise streams of their own, so the output follows the target's
distribution exactly (see `criteria/rejection.py`). Other than under keyed matching, the text
depends on the drafter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flyspec.engine.sampling import (
    ACCEPT_STREAM,
    RESIDUAL_STREAM,
    TARGET_STREAM,
    sample,
    uniform,
)
from flyspec.values.rounds import Decision, Outcome
from verify_service.rules.criteria import Evidence
from verify_service.rules.criteria.rejection import acceptance_ratio, residual_log_weights, stands
from verify_service.rules.observe import Round, most_and_drafted
from verify_service.rules.readings import read
from verify_service.rules.window import RoundEnd


def speculative_sampling(round_: Round, exact_until: int) -> RoundEnd:
    """Walk through the drafts: each stands with probability min(1, p / q).

    Accepted ones are EXACT, for they cost nothing: no guard and no budget. The first that does not
    stand is replaced by a draw from the residual. Indices before `exact_until` are judged by match
    with the target's keyed sample.
    """
    drafts, device = round_.drafts, round_.logits.device
    count = len(drafts)
    exact = min(count, max(0, exact_until))
    processed = round_.processed()
    evidence = round_.evidence(processed)

    def logits(start: int, stop: int) -> Tensor:
        return most_and_drafted(evidence.rows(start, stop))

    def chance(start: int, stop: int) -> Tensor:
        at = evidence.rows(start, stop)
        u = uniform(at.positions, at.seed, ACCEPT_STREAM, device)
        return torch.stack([acceptance_ratio(at).to(torch.float64), u], dim=-1)

    def correction(start: int, stop: int) -> Tensor:
        return _residual_draw(evidence.rows(start, stop))[:, None]

    # The target's own sample is needed before `exact_until` and for the bonus alone.
    own = [
        round_.choose(processed, 0, exact, TARGET_STREAM),
        round_.choose(processed, count, count + 1, TARGET_STREAM),
    ]
    (own_ids, bonus), readings = read(own, [logits, chance, correction], count, device)
    logits_at, chance_at, correction_at = readings
    decisions: list[Decision] = []
    for index, draft in enumerate(drafts):
        ratio = None
        if index < exact:
            accepted = draft == own_ids[index]
        else:
            ratio, u = chance_at(index)
            accepted = stands(ratio, u)
        if accepted:
            decisions.append(Decision(Outcome.EXACT, draft, measure=ratio))
            continue
        token = int(own_ids[index] if index < exact else correction_at(index)[0])
        most, drafted = logits_at(index)
        decisions.append(Decision(Outcome.REJECTED, token, gap_nats=most - drafted, measure=ratio))
        return RoundEnd(decisions, token, rejected=True)
    return RoundEnd(decisions, int(bonus[0]))


def _residual_draw(at: Evidence) -> Tensor:
    assert at.draft is not None
    weights = residual_log_weights(at.processed, at.draft)
    return sample(weights, at.positions, at.seed, RESIDUAL_STREAM)
