"""Slot KV cache: preallocated memory in which a rollback is a length.

A slot holds one sequence. `SlotCache.select` names the slot and how many of its tokens to keep;
the model's next forward writes behind them. An implementation of transformers' own cache interface
(`Cache` over `CacheLayerMixin`), so that decoders work unmodified. Sliding-window layers keep the
whole sequence and are masked, so any rollback is possible.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from flyspec.errors import ResourceExhaustedError


class SlotLayer(CacheLayerMixin):
    """Keys and values of a layer, [slots, kv_heads, max_length, head_dim], allocated when used."""

    is_sliding = False

    def __init__(self, num_slots: int, max_length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_slots, self._max_length = num_slots, max_length
        self.slot = 0
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for the shapes and types that the model really produces."""

        def allocate(like: Tensor) -> Tensor:
            shape = (self._num_slots, like.shape[1], self._max_length, like.shape[3])
            return torch.empty(shape, dtype=like.dtype, device=like.device)

        self.keys, self.values = allocate(key_states), allocate(value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [1, heads, q, dim] behind the kept tokens; all live keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        assert self.keys is not None
        assert self.values is not None
        keys, values = self.keys[self.slot], self.values[self.slot]
        keys[:, self.length : end] = key_states[0]
        values[:, self.length : end] = value_states[0]
        return keys[None, :, :end], values[None, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length of keys that attention will see, their first position)."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens kept before this forward."""
        return self.length

    def get_max_length(self) -> int:
        """Longest sequence of a slot."""
        return self._max_length


class SlotCache(Cache):
    """The cache of all sessions of a model; hands out slots."""

    def __init__(self, num_layers: int, num_slots: int, max_length: int) -> None:
        self._slot_layers = [SlotLayer(num_slots, max_length) for _ in range(num_layers)]
        super().__init__(layers=list(self._slot_layers))
        self._free = list(range(num_slots))[::-1]
        self.num_slots, self.max_length = num_slots, max_length

    @property
    def num_free(self) -> int:
        """Slots that no session holds."""
        return len(self._free)

    def acquire(self) -> int:
        """Take a slot. Raises `ResourceExhaustedError` when none is free."""
        if not self._free:
            raise ResourceExhaustedError(
                f"all {self.num_slots} sessions are in use; retry later or raise --max-sessions"
            )
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Give a slot back; what it holds is forgotten."""
        assert slot not in self._free
        self._free.append(slot)

    def select(self, slot: int, length: int) -> None:
        """Make the next forward continue `slot` behind its first `length` tokens."""
        for layer in self._slot_layers:
            layer.slot, layer.length = slot, length
