"""Slot KV cache: keys and values of all sessions of a model, in memory allocated once.

Implements transformers' cache interface (`Cache` over `CacheLayerMixin`), so that decoders work
unmodified. Sliding-window layers keep the whole sequence, so that any rollback and any prefix is
possible; attention reads only what is inside the window.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from flyspec.engine.cache_table import Copy
from flyspec.engine.lazy_memory import lazy_zeros
from flyspec.engine.slots import SlotTable

SPARE_ROWS = 512
"""Positions after the last slot: fixed-shape attention reads, masked, beyond a slot's end."""


class SlotLayer(CacheLayerMixin):
    """A layer's keys and values, [slots, max_length, kv_heads, head_dim], allocated when used.

    On a CPU, pages of memory are taken as they are written (`lazy_memory`). Under tensor
    parallelism, a rank holds only its own heads.
    """

    is_sliding = False

    def __init__(self, num_slots: int, max_length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_slots, self._max_length = num_slots, max_length
        self._flat: list[Tensor] = []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for the shapes and types that the model actually produces."""
        rows = self._num_slots * self._max_length

        def allocate(like: Tensor) -> Tensor:
            shape = (rows + SPARE_ROWS, like.shape[1], like.shape[3])
            # Zeros: fixed-shape attention reads beyond the live part, and a mask hides no NaN.
            return lazy_zeros(shape, like.dtype, like.device)

        self._flat = [allocate(key_states), allocate(value_states)]
        self.keys, self.values = (
            flat[:rows].view(self._num_slots, self._max_length, *flat.shape[1:])
            for flat in self._flat
        )
        self.is_initialized = True

    def write(self, key_states: Tensor, value_states: Tensor, index: Tensor) -> None:
        """Write [1, heads, T, dim] to the positions `index` [T], counted across all slots."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        for flat, states in zip(self._flat, (key_states, value_states), strict=True):
            flat.index_copy_(0, index, states[0].transpose(0, 1))

    def read(self, slot: int, first: int, end: int, count: int = 1) -> tuple[Tensor, Tensor]:
        """Return views [count, kv_heads, end - first, dim] of keys and values from `slot` on.

        `end` may exceed the slot's by less than `SPARE_ROWS`, into other slots' contents or zeros.
        """
        at = slot * self._max_length + first
        keys, values = (
            flat.as_strided(
                (count, heads, end - first, dim), (self._max_length * row, dim, row, 1), at * row
            )
            for flat in self._flat
            for heads, dim, row in ((*flat.shape[1:], flat.stride(0)),)
        )
        return keys, values

    @property
    def num_heads(self) -> int:
        return self._flat[0].shape[1]

    def copy(self, copy: Copy) -> None:
        for states in (self.keys, self.values):
            if states is not None:
                states[copy.target, : copy.length] = states[copy.source, : copy.length]

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot; 0 before the first forward."""
        return sum(
            s[0].numel() * s.element_size() for s in (self.keys, self.values) if s is not None
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Not used: `SlotCache.update` does the work (transformers' interface)."""
        raise NotImplementedError

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return no offset: no masks are built (transformers' interface)."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return 0: positions are always given (transformers' interface)."""
        return 0

    def get_max_length(self) -> int:
        return self._max_length


class SlotCache(Cache, SlotTable):
    """The cache of all sessions of a model, and the table of its slots."""

    def __init__(self, num_layers: int, num_slots: int, max_length: int) -> None:
        self.slot_layers = [SlotLayer(num_slots, max_length) for _ in range(num_layers)]
        Cache.__init__(self, layers=list(self.slot_layers))
        SlotTable.__init__(self, num_slots, max_length)
        self._index: Tensor | None = None

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot over all layers; 0 before the first forward."""
        return sum(layer.bytes_per_slot for layer in self.slot_layers)

    def begin(self, index: Tensor) -> None:
        """Carry out the pending copies; the next forward's rows go to the positions `index` [T].

        Copies run in the order requested, before anything is written: only earlier copies have
        changed a copy's source since it was requested.
        """
        for copy in self.pending_copies:
            for layer in self.slot_layers:
                layer.copy(copy)
        self.pending_copies.clear()
        self._index = index

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values; attention reads the layer directly."""
        assert self._index is not None
        self.slot_layers[layer_idx].write(key_states, value_states, self._index)
        return key_states, value_states
