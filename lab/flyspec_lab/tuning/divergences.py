"""How far draft and target are apart where tokens were drafted, by a recording."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flyspec.rules import Divergence
from flyspec_lab.tuning.recording import TuningRecord
from flyspec_lab.tuning.replay import distributions_of, rebuilt
from verify_service.rules.criteria.divergence import FORMULAS, comparable


@dataclass(frozen=True)
class DraftedDivergences:
    """A divergence at each drafted position, and whether the draft is the target's own token.

    Positions after a round's first mismatch count as well: there both models go on from the draft.
    """

    kind: Divergence
    values: NDArray[np.float64]
    matches: NDArray[np.bool_]


def drafted_divergences(
    recording: TuningRecord, kind: Divergence = Divergence.JS
) -> DraftedDivergences:
    """Return a recording's divergences, as the rule `fuzzy` compares distributions.

    That is at temperature 1, over the draft's most likely tokens and one bucket for the rest. What
    the record lacks of the target is taken for uniform (`rebuilt`).
    """
    values, matches = [], []
    for round_ in recording.rounds:
        logits = rebuilt(round_, recording.info.vocab_size)[:-1]
        compared = comparable(logits, distributions_of(round_), 0)
        values.append(FORMULAS[kind](*compared).clamp_(min=0.0).double().numpy(force=True))
        matches.append(round_.logit_ids[:-1, 0] == np.array(round_.draft_token_ids))
    if not values:
        return DraftedDivergences(kind, np.empty(0), np.empty(0, np.bool_))
    return DraftedDivergences(kind, np.concatenate(values), np.concatenate(matches))
