"""The KV cache in blocks: a session takes as many as its sequence needs, wherever they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flyspec.engine.cache_table import BlockChange, Moves
from flyspec.engine.kv_memory import KVCache, KVLayer
from flyspec.engine.pages import PageTable
from flyspec.engine.upload import upload


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
