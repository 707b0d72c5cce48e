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
from flyspec.engine.kv_memory import KVCache, KVLayer


class SlotAttention(SegmentAttention):
    """Runs each segment over its own keys; with `padded` (slots only), short ones in one call."""

    def __init__(self, cache: KVCache, padded: bool) -> None:
        super().__init__(cache)
        self._padded = padded

    def prepare(self, segments: Sequence[Segment]) -> StepAttention:
        return _SlotStep(self, segments, self._padded)


class _SlotStep(StepAttention):
    """Makes masks once per step, for all layers."""

    def __init__(self, backend: SlotAttention, segments: Sequence[Segment], padded: bool) -> None:
        super().__init__(backend)
        self.segments, self._padded = segments, padded
        self._masks: dict[tuple[Segment, int | None], Tensor] = {}
        self._paddings: dict[int | None, tuple[Tensor, Tensor, Tensor]] = {}

    def attend(self, query: Tensor, layer: KVLayer, how: Attending) -> Tensor:
        out = torch.empty(
            (query.shape[1], query.shape[0], _of(layer.values).shape[-1]),
            dtype=query.dtype,
            device=query.device,
        )
        together = []
        for segment in self.segments:
            if self._padded and segment.length <= MAX_FOLDED_ROWS and not segment.parents:
                together.append(segment)
            else:
                self._one(segment, query, layer, how, out)
        if together:
            self._batch(together, query, layer, how, out)
        return out

    def _one(
        self, segment: Segment, query: Tensor, layer: KVLayer, how: Attending, out: Tensor
    ) -> None:
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

    def _batch(
        self,
        segments: Sequence[Segment],
        query: Tensor,
        layer: KVLayer,
        how: Attending,
        out: Tensor,
    ) -> None:
        """Run short segments in one call, padded to the longest."""
        heads, _, dim = query.shape
        keys, values = _of(layer.keys), _of(layer.values)
        kv_heads = keys.shape[2]
        group = heads // kv_heads
        count = max(segment.length for segment in segments)
        end = max(segment.end for segment in segments)
        first = min(how.first_key(segment.start) for segment in segments)
        if how.window not in self._paddings:
            masks = [_mask(s.start, count, first, end, how.window, query) for s in segments]
            mask = torch.stack(masks)[:, None].repeat(1, 1, group, 1)
            self._paddings[how.window] = (*_padding(segments, count, query.device), mask)
        rows, kept, mask = self._paddings[how.window]
        q = query.transpose(0, 1)[rows].view(len(segments), count, kv_heads, group, dim)
        q = q.permute(0, 2, 3, 1, 4).reshape(len(segments), kv_heads, group * count, dim)
        k, v = (_select(s, segments, first, end).transpose(1, 2) for s in (keys, values))
        result = how.apply(q, k, v, mask)
        result = result.view(len(segments), kv_heads, group, count, -1).permute(0, 3, 1, 2, 4)
        result = result.reshape(len(segments) * count, heads, -1)
        out[rows[kept]] = result[kept]


def _of(states: Tensor | None) -> Tensor:
    assert states is not None, "a layer must be written before it is read"
    return states


def _padding(
    segments: Sequence[Segment], count: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The packed row of each of B * count places, and which places are not padding."""
    places = torch.arange(count)
    counts = torch.tensor([segment.length for segment in segments])[:, None]
    first = torch.tensor([segment.row for segment in segments])[:, None]
    rows = first + torch.minimum(places, counts - 1)
    kept = (places < counts).flatten().nonzero()[:, 0]
    return rows.flatten().to(device), kept.to(device)


def _select(states: Tensor, segments: Sequence[Segment], first: int, end: int) -> Tensor:
    """[B, keys, kv_heads, dim] of the segments' slots: a view if they are adjacent."""
    slots = [segment.slot for segment in segments]
    if slots == list(range(slots[0], slots[0] + len(slots))):
        return states[slots[0] : slots[0] + len(slots), first:end]
    return states[:, first:end].index_select(0, torch.tensor(slots, device=states.device))


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
