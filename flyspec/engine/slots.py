"""Slot KV cache: preallocated memory in which a rollback is a length and a prefix is paid for once.

A slot holds one sequence. A step names the slot and how many of its tokens to keep; the forward
writes behind them, wherever each slot is. A released slot keeps its contents until the slot is
needed: a sequence that begins alike starts from them, or from a copy of a busy slot's.

An implementation of transformers' own cache interface (`Cache` over `CacheLayerMixin`), so that
decoders work unmodified. Sliding-window layers keep the whole sequence, so that any rollback and
any prefix is possible; attention reads only what is inside the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from flyspec.errors import ResourceExhaustedError

SPARE_ROWS = 512
"""Positions behind the last slot: attention of fixed shape reads, masked, beyond a slot's end."""

MIN_REUSE = 16
"""Shorter common prefixes are computed again: a copy costs about as much."""


class Copy(NamedTuple):
    """The first `length` tokens of slot `source` become those of slot `target`."""

    source: int
    target: int
    length: int


class Lease(NamedTuple):
    """A slot, and how many tokens of the sequence it was asked for it holds already."""

    slot: int
    length: int


class SlotLayer(CacheLayerMixin):
    """A layer's keys and values, [slots, max_length, kv_heads, head_dim], allocated when used.

    Under tensor parallelism they are those of the rank's own heads.
    """

    is_sliding = False

    def __init__(self, num_slots: int, max_length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_slots, self._max_length = num_slots, max_length
        self._flat: list[Tensor] = []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for the shapes and types that the model really produces."""
        rows = self._num_slots * self._max_length

        def allocate(like: Tensor) -> Tensor:
            shape = (rows + SPARE_ROWS, like.shape[1], like.shape[3])
            # Zeros: attention of fixed shape reads beyond the live part, and a mask hides no NaN.
            return torch.zeros(shape, dtype=like.dtype, device=like.device)

        self._flat = [allocate(key_states), allocate(value_states)]
        self.keys, self.values = (
            flat[:rows].view(self._num_slots, self._max_length, *flat.shape[1:])
            for flat in self._flat
        )
        self.is_initialized = True

    def write(self, key_states: Tensor, value_states: Tensor, index: Tensor) -> None:
        """Write [1, heads, T, dim] to the positions `index` [T], counted through all slots."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        for flat, states in zip(self._flat, (key_states, value_states), strict=True):
            flat.index_copy_(0, index, states[0].transpose(0, 1))

    def read(self, slot: int, first: int, end: int, count: int = 1) -> tuple[Tensor, Tensor]:
        """Keys and values [count, kv_heads, end - first, dim], views, of slots from `slot` on.

        `end` may exceed the slot's by less than `SPARE_ROWS`; what is there is other slots' or 0.
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
        """KV heads, of this rank."""
        return self._flat[0].shape[1]

    def copy(self, copy: Copy) -> None:
        """Carry out a copy between slots."""
        for states in (self.keys, self.values):
            if states is not None:
                states[copy.target, : copy.length] = states[copy.source, : copy.length]

    @property
    def bytes_per_slot(self) -> int:
        """Memory of one slot; 0 before the first forward."""
        return sum(
            s[0].numel() * s.element_size() for s in (self.keys, self.values) if s is not None
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Part of transformers' interface; `SlotCache.update` does the work."""
        raise NotImplementedError

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Part of transformers' interface; no masks are made, attention knows the lengths."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Part of transformers' interface; positions are always given."""
        return 0

    def get_max_length(self) -> int:
        """Longest sequence of a slot."""
        return self._max_length


class SlotCache(Cache):
    """The cache of all sessions of a model; hands out slots.

    Owned by the thread that runs the model. `queries` and `hits` count tokens asked for by
    `acquire` and found (vLLM's `prefix_cache_queries` and `prefix_cache_hits`).
    """

    def __init__(self, num_layers: int, num_slots: int, max_length: int) -> None:
        self.slot_layers = [SlotLayer(num_slots, max_length) for _ in range(num_layers)]
        super().__init__(layers=list(self.slot_layers))
        self.num_slots, self.max_length = num_slots, max_length
        self.reuse = True
        self.queries = self.hits = 0
        self.pending_copies: list[Copy] = []
        self._index: Tensor | None = None
        # Free slots, the least recently used first; what each slot holds, free or not.
        self._free = list(range(num_slots))
        self._token_ids = np.zeros((num_slots, max_length), dtype=np.int32)
        self._lengths = np.zeros(num_slots, dtype=np.int64)

    @property
    def num_free(self) -> int:
        """Slots that no session holds."""
        return len(self._free)

    @property
    def bytes_per_slot(self) -> int:
        """Memory of one slot over all layers; 0 before the first forward."""
        return sum(layer.bytes_per_slot for layer in self.slot_layers)

    def acquire(self, token_ids: Sequence[int] = ()) -> Lease:
        """Take a slot for a sequence that begins with `token_ids`.

        The free slot that holds them, where that is most of what it holds; else the least recently
        used one, whose contents are given up for a copy of what another slot holds of them. Raises
        `ResourceExhaustedError` when none is free.
        """
        if not self._free:
            raise ResourceExhaustedError(
                f"all {self.num_slots} sessions are in use; retry later or raise --max-sessions"
            )
        common = self._common(token_ids)
        self.queries += len(token_ids)
        slot = max(self._free, key=lambda free: int(common[free]))
        # A short common beginning is not worth a long sequence that may be asked for again.
        if common[slot] < max(MIN_REUSE, int(self._lengths[slot]) // 2):
            slot = self._free[0]
        donor, length = int(common.argmax()), int(common[slot])
        if common[donor] >= length + MIN_REUSE:
            length = int(common[donor])
            self.pending_copies.append(Copy(donor, slot, length))
            self._token_ids[slot, :length] = self._token_ids[donor, :length]
        self._free.remove(slot)
        self._lengths[slot] = length
        self.hits += length
        return Lease(slot, length)

    def release(self, slot: int) -> None:
        """Give a slot back; what it holds stays until the slot is needed."""
        assert slot not in self._free
        self._free.append(slot)

    def forget(self) -> None:
        """Reuse nothing of what the slots hold."""
        self._lengths[:] = 0

    def begin(self, index: Tensor) -> None:
        """Carry out the pending copies; the next forward's rows go to the positions `index` [T].

        In the order they were asked for, and before anything is written: since a copy was asked for
        only copies before it have changed what its source holds.
        """
        for copy in self.pending_copies:
            for layer in self.slot_layers:
                layer.copy(copy)
        self.pending_copies.clear()
        self._index = index

    def reserve(self, slot: int, start: int, count: int) -> None:
        """Note that `count` positions of `slot` behind its first `start` are to be overwritten.

        What they held is gone even if the forward fails. Raises `ValueError` beyond the slot's end.
        """
        if start < 0 or start + count > self.max_length:
            raise ValueError(
                f"{count} tokens behind the first {start} exceed a slot of {self.max_length}"
            )
        self._lengths[slot] = min(start, int(self._lengths[slot]))

    def record(self, slot: int, start: int, token_ids: Sequence[int]) -> None:
        """Note that `slot` holds `token_ids` behind its first `start` tokens, and nothing else."""
        end = start + len(token_ids)
        self._token_ids[slot, start:end] = token_ids
        self._lengths[slot] = end

    def held(self, slot: int) -> list[int]:
        """The token ids whose keys and values `slot` holds, as far as they may be reused."""
        held: list[int] = self._token_ids[slot, : self._lengths[slot]].tolist()
        return held

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values; attention reads the layer itself."""
        assert self._index is not None
        self.slot_layers[layer_idx].write(key_states, value_states, self._index)
        return key_states, value_states

    def _common(self, token_ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """How many of `token_ids` each slot begins with."""
        count = min(len(token_ids), self.max_length)
        if not self.reuse or count < MIN_REUSE:
            return np.zeros(self.num_slots, dtype=np.int64)
        differs = self._token_ids[:, :count] != np.asarray(token_ids[:count], dtype=np.int32)
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), count)
        return np.minimum(first, self._lengths)
