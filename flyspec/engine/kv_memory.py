"""Memory for the keys and values of all sessions of a model, allocated once, behind transformers'
cache interface (`Cache` over `CacheLayerMixin`), so that decoders work unmodified.

Rows are handed out in slots, a session's room for the longest sequence in one piece, or in blocks,
of which a session takes as many as its sequence needs, wherever they are. Sliding-window layers
keep the whole sequence, so that any rollback and any prefix is possible; attention reads only what
is inside the window.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from flyspec.engine.cache_table import SPARE_ROWS, ZEROS, BlockChange, Copy, Moves, RowCopy
from flyspec.engine.lazy_memory import lazy_zeros
from flyspec.engine.pages import PageTable
from flyspec.engine.slots import SlotTable
from flyspec.engine.upload import upload


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


class PagedLayer(KVLayer):
    """A layer's keys and values by block. Block 0 takes what padding writes."""

    def __init__(self, table: PageTable) -> None:
        super().__init__(table.num_blocks + 1, table.block_size)
        self._table = table

    def read(self, slot: int, first: int, end: int, count: int = 1) -> tuple[Tensor, Tensor]:
        """Return copies, gathered block by block: for CPUs, and to compare with."""
        size = self._table.block_size
        begin, stop = first // size, -(-end // size)
        blocks = np.zeros((count, stop - begin), np.int64)
        held = self._table.blocks[slot : slot + count, begin:stop]
        blocks[:, : held.shape[1]] = held
        index = torch.from_numpy(blocks.reshape(-1))
        at = first - begin * size
        keys, values = (
            states.index_select(0, index.to(states.device))
            .view(count, -1, *states.shape[2:])[:, at : at + end - first]
            .transpose(1, 2)
            for states in (self.keys, self.values)
            if states is not None
        )
        return keys, values


class PagedCache(KVCache, PageTable):
    """The cache of all sessions of a model, and the table of its blocks."""

    def __init__(
        self, num_layers: int, num_slots: int, max_length: int, num_blocks: int, block_size: int
    ) -> None:
        PageTable.__init__(self, num_slots, max_length, num_blocks, block_size)
        KVCache.__init__(self, [PagedLayer(self) for _ in range(num_layers)])
        self._mirror: Tensor | None = None
        self._stale = False

    def mirror(self, device: torch.device) -> Tensor:
        """The block table on a device: int32 [1 + slots, blocks of the longest sequence].

        Row 0 is that of padding, block 0 alone; slot s is row s + 1. `carry_out` updates it.
        """
        if self._mirror is None:
            rows = np.concatenate([np.zeros_like(self.blocks[:1]), self.blocks])
            self._mirror = torch.from_numpy(rows).to(device)
        return self._mirror

    def carry_out(self, moves: Moves) -> None:
        """Copy blocks, and repeat the table's changes on the device."""
        stale, self._stale = self._stale, True  # if any of this fails
        super().carry_out(moves)
        if self._mirror is not None and stale:
            self._mirror[1:].copy_(torch.from_numpy(self.blocks))
        elif self._mirror is not None and moves.changes:
            self._repeat(moves.changes)
        self._stale = False

    def _repeat(self, changes: Sequence[BlockChange]) -> None:
        assert self._mirror is not None
        latest = {(slot, index): block for slot, index, block in changes}
        width = self.blocks.shape[1]
        numbers = [[(slot + 1) * width + index, block] for (slot, index), block in latest.items()]
        moved = upload(torch.tensor(numbers, dtype=torch.int32), self._mirror.device)
        self._mirror.view(-1).index_copy_(0, moved[:, 0].long(), moved[:, 1])
