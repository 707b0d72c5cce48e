"""Memory for the keys and values of all sessions of a model, allocated once, behind transformers'
cache interface (`Cache` over `CacheLayerMixin`), so that decoders work unmodified.

Which rows hold what is up to `slot_cache` (a slot per session) or `paged_cache` (blocks).
Sliding-window layers keep the whole sequence, so that any rollback and any prefix is possible;
attention reads only what is inside the window.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from flyspec.engine.cache_table import ZEROS, Copy, Moves, RowCopy
from flyspec.engine.lazy_memory import lazy_zeros


class KVLayer(CacheLayerMixin):
    """A layer's keys and values: `rows` rows of [kv_heads, head_dim] each, allocated when used.

    `units` times `unit_rows` of them are handed out, in the slots or blocks that `keys` and
    `values` [units, unit_rows, kv_heads, head_dim] show; the spare ones after them are only read.
    On a CPU, memory is taken as it is written (`lazy_memory`). Under tensor parallelism, a rank
    holds only its own heads.
    """

    is_sliding = False

    def __init__(self, units: int, unit_rows: int, spare_rows: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._units, self._unit_rows, self._spare_rows = units, unit_rows, spare_rows
        self._flat: list[Tensor] = []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for the shapes and types that the model actually produces."""
        rows = self._units * self._unit_rows

        def allocate(like: Tensor) -> Tensor:
            shape = (rows + self._spare_rows, like.shape[1], like.shape[3])
            # Zeros: fixed-shape attention reads beyond the live part, and a mask hides no NaN.
            return lazy_zeros(shape, like.dtype, like.device)

        self._flat = [allocate(key_states), allocate(value_states)]
        self.keys, self.values = (
            flat[:rows].view(self._units, self._unit_rows, *flat.shape[1:]) for flat in self._flat
        )
        self.is_initialized = True

    def write(self, key_states: Tensor, value_states: Tensor, index: Tensor) -> None:
        """Write [1, heads, T, dim] to the rows `index` [T]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        for flat, states in zip(self._flat, (key_states, value_states), strict=True):
            flat.index_copy_(0, index, states[0].transpose(0, 1))

    @abstractmethod
    def read(self, slot: int, first: int, end: int, count: int = 1) -> tuple[Tensor, Tensor]:
        """Return [count, kv_heads, end - first, dim] of keys and values from `slot` on.

        They are the positions from `first` to `end`, which may exceed what the slot holds: into
        other contents, or zeros.
        """

    def copy(self, copy: Copy | RowCopy) -> None:
        if isinstance(copy, RowCopy):
            for flat in self._flat:
                flat[copy.targets] = flat[copy.sources]  # reads all before it writes
            return
        for states in (self.keys, self.values):
            if states is None:
                continue
            if copy.source == ZEROS:
                states[copy.target, : copy.length] = 0
            else:
                states[copy.target, : copy.length] = states[copy.source, : copy.length]

    @property
    def num_heads(self) -> int:
        return self._flat[0].shape[1]

    @property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all units as [units * unit_rows, kv_heads, head_dim]."""
        count = self._units * self._unit_rows
        keys, values = (flat[:count] for flat in self._flat)
        return keys, values

    @property
    def bytes_per_row(self) -> int:
        """Bytes of a token's keys and values; 0 before the first forward."""
        return sum(flat[0].numel() * flat.element_size() for flat in self._flat)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Not used: `KVCache.update` does the work (transformers' interface)."""
        raise NotImplementedError

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return no offset: no masks are built (transformers' interface)."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return 0: positions are always given (transformers' interface)."""
        return 0

    def get_max_length(self) -> int:
        return self._units * self._unit_rows


class KVCache(Cache):
    """The memory of all layers. Subclasses are also the table that says which rows hold what."""

    pending_copies: list[Copy | RowCopy]

    def __init__(self, kv_layers: Sequence[KVLayer]) -> None:
        super().__init__(layers=list(kv_layers))
        self.kv_layers = list(kv_layers)
        self._index: Tensor | None = None

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token over all layers; 0 before the first forward."""
        return sum(layer.bytes_per_row for layer in self.kv_layers)

    def carry_out(self, moves: Moves) -> None:
        """Copy what the table wants copied, before the next forward.

        Copies run in the order requested: only earlier ones have changed a copy's source since.
        """
        done = 0
        try:
            for copy in moves.copies:
                for layer in self.kv_layers:
                    layer.copy(copy)
                done += 1
        except Exception:
            self.pending_copies[:0] = moves.copies[done:]  # for the next try
            raise

    def begin(self, index: Tensor) -> None:
        """The next forward's rows go to the memory's rows `index` [T]."""
        self._index = index

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values; attention reads the layer directly."""
        assert self._index is not None
        self.kv_layers[layer_idx].write(key_states, value_states, self._index)
        return key_states, value_states
