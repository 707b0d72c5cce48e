"""Attention over blocks by torch's `scaled_dot_product_attention`, on a copy of each sequence's
keys and values: for every device and type, to compare with, and slow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flyspec.engine.attention.base import Attending, visible
from flyspec.engine.attention.paged import PagedAttention, PagedStep, Places
from flyspec.engine.captured.shapes import StepShape
from flyspec.engine.kv_memory import KVLayer


class GatheredAttention(PagedAttention):
    """Copies keys and values in every layer."""

    name = "sdpa"

    def step(self, shape: StepShape, places: Places, once: bool = False) -> PagedStep:
        return _GatheredStep(self, shape, places)


class _GatheredStep(PagedStep):
    def __init__(self, backend: PagedAttention, shape: StepShape, places: Places) -> None:
        super().__init__(backend)
        self._shape, self._places = shape, places

    def begin(self) -> None:
        size = self.backend.cache.block_size
        places = self._places
        tables = self.backend.tables(places)
        within = torch.arange(size, device=tables.device)
        self._rows = (tables.long()[:, :, None] * size + within).flatten()
        self._masks: dict[int | None, Tensor] = {}

    def end(self) -> None:
        del self._rows, self._masks

    def attend(self, query: Tensor, layer: KVLayer, how: Attending) -> Tensor:
        heads, _, dim = query.shape
        sequences, longest, _ = self._shape
        group = heads // layer.num_heads
        q = query.view(heads, sequences, longest, dim).transpose(0, 1)
        q = q.reshape(sequences, layer.num_heads, group * longest, dim)
        for states in (layer.keys, layer.values):
            if states is not None:
                states[0].zero_()  # what padding wrote is read too, and a mask hides no NaN
        keys, values = (
            rows.index_select(0, self._rows).view(sequences, -1, *rows.shape[1:]).transpose(1, 2)
            for rows in layer.rows
        )
        out = how.apply(q, keys, values, self._mask(how.window, group, query))
        out = out.reshape(sequences, heads, longest, -1).permute(0, 2, 1, 3)
        return out.reshape(sequences * longest, heads, -1)

    def _mask(self, window: int | None, group: int, like: Tensor) -> Tensor:
        """[sequences, 1, group * longest, keys], 0 or -inf: made once a step and window."""
        if window not in self._masks:
            sequences, longest, _ = self._shape
            queries = self._places.positions.view(sequences, 1, longest, 1)
            keys = torch.arange(self._rows.shape[0] // sequences, device=like.device)
            seen = visible(queries, keys, window)
            mask = torch.zeros((), dtype=like.dtype, device=like.device).where(seen, -torch.inf)
            self._masks[window] = mask.repeat(1, 1, group, 1)
        return self._masks[window]
