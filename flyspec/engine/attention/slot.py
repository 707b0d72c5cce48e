"""Attention in a step's own shapes: each row reads only its own sequence.

In short segments, the query heads that share a KV head are folded into rows: no key or value is
repeated, and the fast kernel runs with or without a mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flyspec.draft_trees import depths, paths
from flyspec.engine.attention.base import (
    MAX_FOLDED_ROWS,
    Attending,
    Segment,
    SegmentAttention,
    StepAttention,
    visible,
)
from flyspec.engine.kv_memory import KVLayer


class SlotAttention(SegmentAttention):
    """Runs each segment over its own keys."""

    def prepare(self, segments: Sequence[Segment]) -> StepAttention:
        return _SlotStep(self, segments)


class _SlotStep(StepAttention):
    """Makes masks once per step, for all layers."""

    def __init__(self, backend: SlotAttention, segments: Sequence[Segment]) -> None:
        super().__init__(backend)
        self.segments = segments
        self._masks: dict[tuple[Segment, int | None], Tensor] = {}

    def attend(self, query: Tensor, layer: KVLayer, how: Attending) -> Tensor:
        assert layer.values is not None, "a layer must be written before it is read"
        size = query.shape[1], query.shape[0], layer.values.shape[-1]
        out = torch.empty(size, dtype=query.dtype, device=query.device)
        for segment in self.segments:
            rows = slice(segment.row, segment.row + segment.length)
            first, end = how.first_key(segment.start), segment.end
            keys, values = layer.read(segment.slot, first, end)
            key = (segment, how.window)
            if segment.length > 1 and key not in self._masks:
                if segment.parents:
                    mask = _tree_mask(segment, first, how.window, query)
                else:
                    mask = _mask(segment.start, segment.length, first, end, how.window, query)
                if segment.length <= MAX_FOLDED_ROWS:
                    mask = mask.repeat(query.shape[0] // keys.shape[1], 1)
                self._masks[key] = mask
            out[rows] = how.attend(query[:, rows], keys, values, self._masks.get(key))
        return out


def _mask(start: int, count: int, first: int, end: int, window: int | None, like: Tensor) -> Tensor:
    """Mask (0 or -inf) of keys `first` to `end` for `count` queries from `start` on."""
    queries = torch.arange(start, start + count, device=like.device)[:, None]
    keys = torch.arange(first, end, device=like.device)
    seen = visible(queries, keys, window)
    return torch.zeros((), dtype=like.dtype, device=like.device).where(seen, -torch.inf)


def _tree_mask(segment: Segment, first: int, window: int | None, like: Tensor) -> Tensor:
    """The mask of all keys from `first` on for a segment that ends with a tree.

    The tree's keys lie one after the other, each visible to its own row and those that follow it.
    """
    size = len(segment.parents)
    root = segment.end - size - 1  # position of the token before the tree
    behind = [root + depth for depth in depths(segment.parents)]
    positions = torch.tensor([*range(root + 1), *behind], device=like.device)
    seen = visible(positions[segment.start :, None], positions[first:], window)
    leads = torch.zeros((size, size), dtype=torch.bool)
    for row, path in enumerate(paths(segment.parents)):
        leads[row, path] = True
    seen[-size:, -size:] &= leads.to(like.device)
    return torch.zeros((), dtype=like.dtype, device=like.device).where(seen, -torch.inf)
