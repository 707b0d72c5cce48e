"""The interface of attention over the slots: prepared once per step, called by each layer.

Modelled on `attention/base.py` of mini-sglang.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flyspec.engine.kv_memory import KVCache, KVLayer

MAX_FOLDED_ROWS = 64
"""Longer segments are not folded, since that repeats their mask."""
KEY_BLOCK = 512
"""Keys per block of a sum, as in torch's CPU kernel."""


class Segment(NamedTuple):
    """Rows `row` to `row + length` of a packed step continue `slot` at position `start`.

    The last ones may be a tree, as in `Step.parents`.
    """

    slot: int
    start: int
    length: int
    row: int
    parents: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Length of the sequence after the step."""
        return self.start + self.length


class Attending(NamedTuple):
    """The attention parameters of a layer."""

    scale: float
    window: int | None = None
    softcap: float | None = None

    def first_key(self, position: int) -> int:
        """Return the first position that a query at `position` reads."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Return [n, heads, dim] for queries [heads, n, dim] of one sequence.

        Up to `MAX_FOLDED_ROWS` rows are folded; `mask` must then repeat for each head of a group.
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
        """Return attention over [B, kv_heads, n, dim] with an additive mask [.., n, keys]."""
        if self.softcap is None:
            return scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, scale=self.scale
            )
        # No torch kernel has a softcap: use the formula, in blocks, so that padding changes no sum.
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
        """Like `apply`, for unfolded query heads [1, heads, n, dim] of long segments."""
        _, heads, count, dim = query.shape
        kv_heads = keys.shape[1]
        if self.softcap is None and query.device.type == "cpu":
            return scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, scale=self.scale, enable_gqa=True
            )
        # On CUDA, a mask with enable_gqa falls back to the slow kernel; repeating by view is free.
        group = heads // kv_heads
        keys, values = (s[0][:, None].expand(-1, group, -1, -1) for s in (keys, values))
        return self.apply(query.view(kv_heads, group, count, dim), keys, values, mask)


class StepAttention(ABC):
    """Attention of one packed step."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend = backend

    @abstractmethod
    def attend(self, query: Tensor, layer: KVLayer, how: Attending) -> Tensor:
        """Return [T, heads, dim] for `query` [heads, T, dim]."""


class AttentionBackend:
    """A way to attend over the sequences in a model's cache."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.windows: dict[int, int | None] = {}
        """The window that each layer last requested, by layer."""


class SegmentAttention(AttentionBackend, ABC):
    """Attention in shapes that follow from each step's segments, which the host knows."""

    @abstractmethod
    def prepare(self, segments: Sequence[Segment]) -> StepAttention:
        """Return the attention for a step of these segments."""


def visible(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Return which of the positions `keys` the positions `queries` may read; shapes broadcast."""
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)
