"""Attention of a packed step over the slots: each row reads its own sequence, and only that.

Registered with transformers' `AttentionInterface` as "flyspec"; no mask function has that name, so
transformers builds no masks. What each row may read is in the `StepLayout`, which travels through
the model's forward as the keyword argument `layout`.

In short segments the query heads that share a KV head are folded into rows: no key or value is
repeated, and the kernel is the fast one with a mask and without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from flyspec.engine.slots import SlotCache, SlotLayer
from flyspec.engine.support import check_call

NAME = "flyspec"
MAX_FOLDED_ROWS = 64
"""Longer segments are not folded, since that repeats their mask, and never padded to others."""
KEY_BLOCK = 512
"""Keys are summed over in blocks of so many, as torch's CPU kernel does."""


class Segment(NamedTuple):
    """Rows `row` to `row + length` of a packed step continue `slot` at position `start`."""

    slot: int
    start: int
    length: int
    row: int

    @property
    def end(self) -> int:
        """Length of the sequence after the step."""
        return self.start + self.length


@dataclass(eq=False)
class StepLayout:
    """Where the rows of a packed step belong. `padded`: short segments attend in one batch.

    `instead`, if given, is the attention of this step's segments.
    """

    cache: SlotCache
    segments: Sequence[Segment]
    padded: bool = False
    instead: Attention | None = None

    def __post_init__(self) -> None:
        self._masks: dict[tuple[Segment, int | None], Tensor] = {}
        self._paddings: dict[int | None, tuple[Tensor, Tensor, Tensor]] = {}
        self.windows: dict[int, int | None] = {}
        """What each layer's attention was asked for, by layer."""

    def attend(self, query: Tensor, layer: SlotLayer, how: Attending) -> Tensor:
        """[T, heads, dim] for `query` [heads, T, dim]."""
        if self.instead is not None:
            return self.instead.attend(query, layer, how)
        out = torch.empty(
            (query.shape[1], query.shape[0], _of(layer.values).shape[-1]),
            dtype=query.dtype,
            device=query.device,
        )
        together = []
        for segment in self.segments:
            if self.padded and segment.length <= MAX_FOLDED_ROWS:
                together.append(segment)
            else:
                self._one(segment, query, layer, how, out)
        if together:
            self._batch(together, query, layer, how, out)
        return out

    def _one(
        self, segment: Segment, query: Tensor, layer: SlotLayer, how: Attending, out: Tensor
    ) -> None:
        """One segment over a view of its slot."""
        rows = slice(segment.row, segment.row + segment.length)
        first, end = how.first_key(segment.start), segment.end
        keys, values = layer.read(segment.slot, first, end)
        mask = None
        if segment.length > 1:
            mask = self._mask_of(segment, first, end, how, query, keys.shape[1])
        out[rows] = how.attend(query[:, rows], keys, values, mask)

    def _mask_of(
        self,
        segment: Segment,
        first: int,
        end: int,
        how: Attending,
        query: Tensor,
        kv_heads: int,
    ) -> Tensor:
        """A segment's mask, made once a step; repeated for heads that are folded."""
        key = (segment, how.window)
        mask = self._masks.get(key)
        if mask is None:
            mask = _mask(segment.start, segment.length, first, end, how.window, query)
            if segment.length <= MAX_FOLDED_ROWS:
                mask = mask.repeat(query.shape[0] // kv_heads, 1)
            self._masks[key] = mask
        return mask

    def _batch(
        self,
        segments: Sequence[Segment],
        query: Tensor,
        layer: SlotLayer,
        how: Attending,
        out: Tensor,
    ) -> None:
        """Segments of similar size in one call, padded to the longest."""
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


class Attention(Protocol):
    """Attention over a step's rows."""

    def attend(self, query: Tensor, layer: SlotLayer, how: Attending) -> Tensor:
        """[T, heads, dim] for `query` [heads, T, dim]."""


class Attending(NamedTuple):
    """What a layer asks of its attention."""

    scale: float
    window: int | None = None
    softcap: float | None = None

    def first_key(self, position: int) -> int:
        """The first position that a query at `position` reads."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """[n, heads, dim] of queries [heads, n, dim] of one sequence.

        Up to `MAX_FOLDED_ROWS` rows are folded; the mask is then repeated for each head of a group.
        """
        heads, count, dim = query.shape
        kv_heads = keys.shape[1]
        if count <= MAX_FOLDED_ROWS:
            rows = query.reshape(1, kv_heads, heads // kv_heads * count, dim)
            result = self.apply(rows, keys, values, mask)
        else:
            result = self.apply_grouped(query[None], keys, values, mask)
        return result.reshape(heads, count, -1).transpose(0, 1)

    def apply(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attention over [B, kv_heads, n, dim] with an additive mask [.., n, keys]."""
        if self.softcap is None:
            return scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, scale=self.scale
            )
        # No kernel of torch's caps: the formula itself, in blocks, so that padding changes no sum.
        blocks = keys.split(KEY_BLOCK, dim=-2)
        scores = torch.cat([torch.matmul(query, k.transpose(-1, -2)) for k in blocks], dim=-1)
        scores = (scores * self.scale / self.softcap).tanh() * self.softcap
        if mask is not None:
            scores = scores + mask
        high = torch.float64 if scores.dtype == torch.float64 else torch.float32
        weights = scores.softmax(dim=-1, dtype=high).to(values.dtype).split(KEY_BLOCK, dim=-1)
        parts = zip(weights, values.split(KEY_BLOCK, dim=-2), strict=True)
        return sum((torch.matmul(w, v) for w, v in parts), start=query.new_zeros(()))

    def apply_grouped(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
    ) -> Tensor:
        """The same for query heads [1, heads, n, dim] that are not folded: for long segments."""
        _, heads, count, dim = query.shape
        kv_heads = keys.shape[1]
        if self.softcap is None and query.device.type == "cpu":
            return scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, scale=self.scale, enable_gqa=True
            )
        # On CUDA a mask with enable_gqa falls back to the slow kernel; a view repeats for nothing.
        group = heads // kv_heads
        keys, values = (s[0][:, None].expand(-1, group, -1, -1) for s in (keys, values))
        return self.apply(query.view(kv_heads, group, count, dim), keys, values, mask)


def forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: StepLayout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of `query` [1, heads, T, dim]; keys and values are in the layout's cache already.

    The signature is that of transformers' attention functions. Raises `NotImplementedError` if the
    model asks for another kind of attention.
    """
    if layout is None:
        raise NotImplementedError("it passes no arguments on to its attention")
    index = int(module.layer_idx)  # type: ignore[arg-type]
    layer = layout.cache.slot_layers[index]
    check_call(module, attention_mask, kwargs)
    if _of(layer.keys).shape[2:] != (key.shape[1], key.shape[3]):
        raise NotImplementedError(
            "its cached keys are not those of its attention, as in multi-head latent attention"
        )
    layout.windows[index] = sliding_window
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    how = Attending(scale, sliding_window, softcap)
    return layout.attend(query[0], layer, how)[None], None


def _of(states: Tensor | None) -> Tensor:
    assert states is not None, "the layer was written before it is read"
    return states


def _padding(
    segments: Sequence[Segment], count: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The packed row of each of B * count places, and which places are not filling."""
    places = torch.arange(count)
    counts = torch.tensor([segment.length for segment in segments])[:, None]
    first = torch.tensor([segment.row for segment in segments])[:, None]
    rows = first + torch.minimum(places, counts - 1)
    kept = (places < counts).flatten().nonzero()[:, 0]
    return rows.flatten().to(device), kept.to(device)


def _select(states: Tensor, segments: Sequence[Segment], first: int, end: int) -> Tensor:
    """[B, keys, kv_heads, dim] of the segments' slots: a view where they stand side by side."""
    slots = [segment.slot for segment in segments]
    if slots == list(range(slots[0], slots[0] + len(slots))):
        return states[slots[0] : slots[0] + len(slots), first:end]
    return states[:, first:end].index_select(0, torch.tensor(slots, device=states.device))


def _mask(start: int, count: int, first: int, end: int, window: int | None, like: Tensor) -> Tensor:
    """What queries at `start` and behind may read of keys `first` to `end`: 0 or -inf."""
    queries = torch.arange(start, start + count, device=like.device)[:, None]
    keys = torch.arange(first, end, device=like.device)
    seen = visible(queries, keys, window)
    return torch.zeros((), dtype=like.dtype, device=like.device).where(seen, -torch.inf)


def visible(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Which of the positions `keys` the positions `queries` may read; the shapes broadcast."""
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)


@lru_cache(maxsize=1)
def register() -> None:
    """Make "flyspec" known to transformers."""
    AttentionInterface.register(NAME, forward)
