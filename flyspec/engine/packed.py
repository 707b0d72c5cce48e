"""Runs a step in its own shape: the tokens of all sequences packed into one ragged row.

Matrix products see all tokens at once, attention sees each sequence alone (`attention.slot`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flyspec.engine.attention.base import Segment, SegmentAttention
from flyspec.engine.model import Rows, Step
from flyspec.engine.paged_cache import PagedCache
from flyspec.engine.slot_cache import SlotCache


class PackedSteps:
    """A model's forward over segments. Positions must be reserved (`CacheTable`)."""

    def __init__(
        self, model: Any, cache: SlotCache | PagedCache, attention: SegmentAttention
    ) -> None:
        self._model, self._cache, self.attention = model, cache, attention

    def forward(self, steps: Sequence[Step]) -> list[Rows]:
        """Return each step's rows, on the model's device."""
        cache = self._cache
        segments: list[Segment] = []
        token_ids: list[int] = []
        wanted: list[int] = []
        positions: list[int] = []
        index: list[int] = []
        for step in steps:
            slot, start, tokens, num_logits, *_ = step
            row, count = len(token_ids), len(tokens)
            segments.append(Segment(slot, start, count, row, step.parents))
            token_ids += tokens
            positions += step.positions
            index += cache.rows(slot, start, count).tolist()
            wanted += range(row + count - num_logits, row + count)
        total = len(token_ids)
        # One transfer to the device for all; a model always computes some logits.
        packed = torch.tensor([*token_ids, *positions, *index, *(wanted or [0])])
        packed = packed.to(self._model.device, non_blocking=True)
        ids, places, rows, kept = packed.split([total, total, total, len(wanted) or 1])
        layout = self.attention.prepare(segments)
        cache.begin(rows)
        output = self._model(
            input_ids=ids[None],
            position_ids=places[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=kept,
            layout=layout,
            output_hidden_states=any(step.hidden_layers for step in steps),
        )
        found: list[Rows] = []
        at = 0
        for step, segment in zip(steps, segments, strict=True):
            end, stop = at + step.num_logits, segment.row + segment.length
            own = slice(stop - step.hidden_count, stop)
            hidden = (output.hidden_states[i][0, own] for i in step.hidden_layers)
            found.append(Rows(output.logits[0, at:end], tuple(hidden)))
            at = end
        return found
