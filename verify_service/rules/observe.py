"""What the target says of a round, read from its logits: vectorised on their device, read once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flyspec.engine.sampling import SECOND_STREAM, choose_processed, process_logits
from flyspec.types import SamplingParams
from verify_service.rules.presets import Composition


@dataclass(frozen=True, slots=True)
class Observed:
    """Facts of a round of K drafted tokens, from index 0.

    `own` has the target's own token at each of the K + 1 positions; `matches` is in the rule's
    sense. At least where the drafted token is not the target's own: `gaps` are raw logp(most
    likely) - logp(drafted), `possible` is False where the drafted token's processed probability is
    0, that is, its logit -inf, and `measure` gives the criterion's number.
    """

    own: list[int]
    matches: list[bool]
    gaps: Mapping[int, float]
    possible: Mapping[int, bool]
    measure: Callable[[int], float]


def observe(
    parts: Composition,
    draft_token_ids: Sequence[int],
    rows: Tensor,
    sampling: SamplingParams,
    seed: int,
    start_position: int,
) -> Observed:
    """Look at logits [K + 1, V] for what the rule needs; the last row has no drafted token.

    On a CPU reading costs nothing, so mismatches alone are looked at. Elsewhere all rows are, and
    everything is read at once: to come back for the mismatches would cost another wait.
    """
    num_drafts = len(draft_token_ids)
    processed = process_logits(rows, sampling)
    positions = range(start_position, start_position + num_drafts + 1)
    chosen = [choose_processed(processed, sampling, positions, seed)]
    if parts.two_samples and not sampling.greedy:
        chosen.append(choose_processed(processed, sampling, positions, seed, SECOND_STREAM))
    criterion = parts.criterion
    judged_rows = rows if criterion.raw else processed

    if rows.device.type == "cpu":
        chosen_ids = [ids.tolist() for ids in chosen]
        own = chosen_ids[0]
        at = [i for i in range(num_drafts) if draft_token_ids[i] != own[i]]
        columns = _columns(rows, processed, draft_token_ids, at) if at else []
        facts = [column.tolist() for column in columns]

        def measure(index: int) -> float:
            return float(criterion.measure(judged_rows[index : index + 1]).item())
    else:
        at = list(range(num_drafts))
        columns = _columns(rows, processed, draft_token_ids, at)
        if not (criterion.never or criterion.always):
            columns.append(criterion.measure(judged_rows[:num_drafts]))
        # Token ids and logits of every type are exact in float64. One transfer, one wait.
        read = torch.cat([c.to(torch.float64) for c in (*chosen, *columns)]).tolist()
        width = num_drafts + 1
        chosen_ids = [
            [int(token) for token in read[i * width : (i + 1) * width]] for i in range(len(chosen))
        ]
        read = read[len(chosen) * width :]
        facts = [read[i * num_drafts : (i + 1) * num_drafts] for i in range(len(columns))]

        def measure(index: int) -> float:
            return float(facts[-1][index])

    most, raw, truncated = facts[:3] if facts else ([], [], [])
    return Observed(
        own=chosen_ids[0],
        matches=[
            any(draft == ids[i] for ids in chosen_ids) for i, draft in enumerate(draft_token_ids)
        ],
        gaps={i: m - r for i, m, r in zip(at, most, raw, strict=True)},
        possible={i: t != -math.inf for i, t in zip(at, truncated, strict=True)},
        measure=measure,
    )


def _columns(
    rows: Tensor, processed: Tensor, draft_token_ids: Sequence[int], at: list[int]
) -> list[Tensor]:
    """At each index: the largest raw logit, the drafted token's raw and its processed one."""
    index = torch.tensor(at, device=rows.device)
    tokens = torch.tensor([draft_token_ids[i] for i in at], device=rows.device)
    raw = rows[index, tokens]
    most = rows[index].amax(dim=-1) if at else raw
    return [most, raw, raw if processed is rows else processed[index, tokens]]
