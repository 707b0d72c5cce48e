"""The KV cache in slots: each session has room for the longest sequence, in one piece."""

from __future__ import annotations

from torch import Tensor

from flyspec.engine.cache_table import SPARE_ROWS
from flyspec.engine.kv_memory import KVCache, KVLayer
from flyspec.engine.slots import SlotTable


class SlotLayer(KVLayer):
    """A layer's keys and values by slot; reading copies nothing."""

    def __init__(self, num_slots: int, max_length: int) -> None:
        super().__init__(num_slots, max_length, SPARE_ROWS)

    def read(self, slot: int, first: int, end: int, count: int = 1) -> tuple[Tensor, Tensor]:
        """Return views; `end` may exceed the slot's by less than `SPARE_ROWS`."""
        at = slot * self._unit_rows + first
        keys, values = (
            flat.as_strided(
                (count, heads, end - first, dim), (self._unit_rows * row, dim, row, 1), at * row
            )
            for flat in self._flat
            for heads, dim, row in ((*flat.shape[1:], flat.stride(0)),)
        )
        return keys, values


class SlotCache(KVCache, SlotTable):
    """The cache of all sessions of a model, and the table of its slots."""

    def __init__(self, num_layers: int, num_slots: int, max_length: int) -> None:
        KVCache.__init__(self, [SlotLayer(num_slots, max_length) for _ in range(num_layers)])
        SlotTable.__init__(self, num_slots, max_length)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot over all layers; 0 before the first forward."""
        return self.bytes_per_token * self.max_length
