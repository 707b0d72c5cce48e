"""Attention over blocks by torch's FlexAttention: reads keys where they are, by the block table.

The keys and values of the whole cache are one sequence to it, of which each batch entry reads the
blocks in its table (`BlockMask`); the mask function tells a key's position from its row, as in
torch's own `torch.nn.attention.experimental._paged_attention`. Compiled by Triton on GPUs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from flyspec.engine import compiling
from flyspec.engine.attention.base import Attending
from flyspec.engine.attention.paged import GatheredAttention, PagedAttention, PagedStep, Places
from flyspec.engine.captured.shapes import StepShape
from flyspec.engine.kv_memory import KVLayer

log = logging.getLogger(__name__)

QUERY_BLOCK = 128
"""Queries that share a list of blocks, FlexAttention's own default."""
TILE = 64
"""Queries and keys of a tile where queries are many; no more keys than a block has."""


def kernel_options(
    longest: int, group: int, block_size: int, head_size: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Return which of FlexAttention's two Triton kernels to use for queries of this length.

    The one for few queries, its own choice, holds all rows of a KV head in one tile of a power of
    two, which must divide `QUERY_BLOCK`; its default of two warps and one stage spills registers
    (16 kB of 128 rows of 128, compiled for an H100). The general one's tiles must divide our
    blocks; its own defaults do not.
    """
    large = dtype == torch.float32
    stages = 2 if large or head_size >= 256 else 3
    if longest * group <= QUERY_BLOCK and longest < QUERY_BLOCK and not group & (group - 1):
        rows = longest * group
        warps = 8 if large or rows > 64 else 4 if rows > 16 else 2
        return {"num_warps": warps, "num_stages": stages}
    return {
        "FORCE_USE_FLEX_ATTENTION": True,
        "BLOCK_M": TILE,
        "BLOCK_N": min(TILE, block_size),
        "num_warps": 8 if large else 4,
        "num_stages": stages,
    }


class FlexAttention(PagedAttention):
    """`compiled` is for tests on a CPU, where FlexAttention otherwise computes all scores."""

    name = "flex"

    def __init__(self, cache: Any, compiled: bool) -> None:
        super().__init__(cache)
        self.function: Any = flex_attention
        if compiled:
            self.function = compiling.compiled(flex_attention, dynamic=False)

    def step(self, shape: StepShape, places: Places, once: bool = False) -> PagedStep:
        return _FlexStep(self, shape, places)


def uncopied(cache: Any, device: torch.device) -> PagedAttention:
    """Return FlexAttention, or attention on copies where a GPU's would not be compiled.

    Uncompiled, FlexAttention computes the scores of all blocks of the cache.
    """
    if device.type == "cpu" or not (reason := compiling.refusal()):
        return FlexAttention(cache, compiled=device.type != "cpu")
    log.warning("attention copies keys and values, since nothing is compiled: %s", reason)
    return GatheredAttention(cache)


class _FlexStep(PagedStep):
    backend: FlexAttention

    def __init__(self, backend: FlexAttention, shape: StepShape, places: Places) -> None:
        super().__init__(backend)
        self._shape, self._places = shape, places

    def begin(self) -> None:
        """Invert the tables: the index of each block of the cache in each sequence, or -1."""
        cache, tables = self.backend.cache, self.backend.tables(self._places)
        sequences, width = tables.shape
        order = torch.arange(width, dtype=torch.int32, device=tables.device)
        index = torch.full(
            (sequences, cache.num_blocks + 1), -1, dtype=torch.int32, device=tables.device
        )
        self._index = index.scatter_(1, tables.long(), order.expand(sequences, -1))
        self._index[:, :1].fill_(-1)  # the entries where no block is
        self._tables = tables
        self._masks: dict[int | None, BlockMask] = {}

    def end(self) -> None:
        del self._index, self._tables, self._masks

    def attend(self, query: Tensor, layer: KVLayer, how: Attending) -> Tensor:
        heads, _, dim = query.shape
        sequences, longest, tokens = self._shape
        size, group = self.backend.cache.block_size, heads // layer.num_heads
        keys, values = (rows.transpose(0, 1)[None] for rows in layer.rows)
        out = self.backend.function(
            query.view(heads, sequences, longest, dim).transpose(0, 1),
            keys,
            values,
            score_mod=None if how.softcap is None else _capped(how.softcap),
            block_mask=self._mask(how.window),
            kernel_options=kernel_options(longest, group, size, dim, query.dtype),
            scale=how.scale,
            enable_gqa=group > 1,
        )
        result: Tensor = out.transpose(1, 2).reshape(tokens, heads, -1)
        return result

    def _mask(self, window: int | None) -> BlockMask:
        if window not in self._masks:
            self._masks[window] = self._block_mask(window)
        return self._masks[window]

    def _block_mask(self, window: int | None) -> BlockMask:
        cache, index = self.backend.cache, self._index
        size = cache.block_size
        sequences, longest, _ = self._shape
        positions = self._places.positions.view(sequences, longest)

        def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            block = index[b, kv // size]
            key, query = block * size + kv % size, positions[b, q]
            seen = (block >= 0) & (key <= query)
            return seen if window is None else seen & (key > query - window)

        pieces = -(-longest // QUERY_BLOCK)
        firsts = positions[:, ::QUERY_BLOCK]
        # The last query of each piece; positions ascend, and padding repeats the last one.
        lasts = positions[:, QUERY_BLOCK - 1 :: QUERY_BLOCK]
        if longest % QUERY_BLOCK:
            lasts = torch.cat([lasts, positions[:, -1:]], dim=1)
        lasts = torch.where(self._places.ends[:, None] > 0, lasts, -1)
        begin = torch.zeros_like(firsts)
        if window is not None:
            begin = (firsts - window + 1).clamp_(min=0) // size
        count = lasts // size + 1 - begin
        width, every = self._tables.shape[1], index.shape[1]
        columns = begin[:, :, None] + torch.arange(width, device=index.device)
        listed = (
            self._tables[:, None].expand(-1, pieces, -1).gather(2, columns.clamp_(max=width - 1))
        )
        # FlexAttention wants a column for each block; those beyond `count` are not read.
        padding = listed.new_zeros(every)
        listed = torch.cat([listed.flatten(), padding]).as_strided(
            (sequences, 1, pieces, every), (pieces * width, pieces * width, width, 1)
        )
        return BlockMask.from_kv_blocks(
            count[:, None].to(torch.int32),
            listed,
            BLOCK_SIZE=(QUERY_BLOCK, size),
            mask_mod=visible,
            seq_lengths=(longest, every * size),
            compute_q_blocks=False,
        )


@lru_cache(maxsize=8)
def _capped(softcap: float) -> Callable[..., Tensor]:
    def cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap
