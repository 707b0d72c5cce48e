"""What the target says of a round, read from its logits: vectorised on their device, read once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flyspec.engine.sampling import SECOND_STREAM, process_logits, sample
from flyspec.types import SamplingParams
from verify_service.rules.criteria import Criterion
from verify_service.rules.presets import Composition


@dataclass(frozen=True, slots=True)
class Observed:
    """Facts of a round of K drafted tokens, from index 0.

    `own` has the target's own token at each of the K + 1 positions; `matches` is in the rule's
    sense; `gaps` are raw logp(most likely) - logp(drafted); `possible` is False where the drafted
    token's processed probability is 0, that is, its logit -inf; `measure` gives the criterion's
    number at an index.
    """

    own: list[int]
    matches: list[bool]
    gaps: list[float]
    possible: list[bool]
    measure: Callable[[int], float]


def observe(
    parts: Composition,
    draft_token_ids: Sequence[int],
    rows: Tensor,
    sampling: SamplingParams,
    seed: int,
    start_position: int,
) -> Observed:
    """Look at logits [K + 1, V] for what the rule needs; the last row has no drafted token."""
    num_drafts = len(draft_token_ids)
    # The bonus row gets a dummy, so that all columns below are equally long.
    drafted = torch.tensor([*draft_token_ids, 0], dtype=torch.int64, device=rows.device)[:, None]
    drafted_logits = rows.gather(1, drafted)[:, 0]
    if sampling.greedy:
        processed = rows
        top_logits, own = rows.max(dim=-1)
        columns = [own, top_logits, drafted_logits]
    else:
        processed = process_logits(rows, sampling)
        positions = range(start_position, start_position + num_drafts + 1)
        own = sample(processed, positions, seed)
        top_logits = rows.amax(dim=-1)
        columns = [own, top_logits, drafted_logits, processed.gather(1, drafted)[:, 0]]
        if parts.two_samples:
            columns.append(sample(processed, positions, seed, SECOND_STREAM))

    judged_rows = (rows if parts.criterion.raw else processed)[:num_drafts]
    measured_ahead = rows.device.type != "cpu" and _measures(parts.criterion) and num_drafts > 0
    if measured_ahead:
        # Cheaper there than to come back once the mismatches are known.
        numbers = parts.criterion.measure(judged_rows)
        columns.append(torch.cat([numbers, numbers[:1]]))

    # Token ids and logits of every type are exact in float64. One transfer, one wait.
    read = torch.stack([column.to(torch.float64) for column in columns]).tolist()
    own_ids = [int(token) for token in read[0]]
    second = read[4] if parts.two_samples and not sampling.greedy else read[0]
    truncated = read[2] if sampling.greedy else read[3]
    drafts = range(num_drafts)

    def measure(index: int) -> float:
        if measured_ahead:
            return float(read[-1][index])
        return float(parts.criterion.measure(judged_rows[index : index + 1]).item())

    return Observed(
        own=own_ids,
        matches=[draft_token_ids[i] in (own_ids[i], second[i]) for i in drafts],
        gaps=[read[1][i] - read[2][i] for i in drafts],
        possible=[truncated[i] != float("-inf") for i in drafts],
        measure=measure,
    )


def _measures(criterion: Criterion) -> bool:
    return not (criterion.never or criterion.always)
