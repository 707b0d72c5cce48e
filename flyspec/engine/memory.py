"""Plans the KV cache before it is allocated: how many slots or blocks, and their bytes."""

from __future__ import annotations

from typing import Any, NamedTuple

from flyspec.engine.cache_table import SPARE_ROWS
from flyspec.engine.devices import ElementType
from flyspec.engine.heads import heads_per_rank, layer_heads, splits_heads
from flyspec.errors import ConfigError


class KVCachePlan(NamedTuple):
    """A KV cache of slots, or of blocks that the slots share, and its bytes on one device.

    `bytes_per_slot` are those of the whole context, `max_length` tokens; `spare_bytes` those that
    no session uses: after the last slot (`cache_table.SPARE_ROWS`), or of block 0. Without blocks,
    `block_size`, their tokens, and `num_blocks`, which sessions may use, are 0.
    """

    num_slots: int
    max_length: int
    bytes_per_slot: int
    spare_bytes: int = 0
    block_size: int = 0
    num_blocks: int = 0

    @property
    def total_bytes(self) -> int:
        used = self.num_blocks * self.bytes_per_block
        return (used or self.num_slots * self.bytes_per_slot) + self.spare_bytes

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block; 0 without blocks."""
        if not self.block_size:
            return 0
        return self.bytes_per_slot // blocks_of(self.max_length, self.block_size)

    @property
    def shape(self) -> str:
        """Description of its parts."""
        if self.block_size:
            return f"{self.num_blocks:,} blocks x {self.block_size} tokens"
        return f"{self.num_slots} slot{'s' * (self.num_slots > 1)} x {self.max_length} tokens"

    def length_in(self, num_bytes: int) -> int:
        """Return the longest context of which one fits into so many bytes."""
        room = max(0, num_bytes - self.spare_bytes)
        if self.block_size:
            return room // self.bytes_per_block * self.block_size
        return room * self.max_length // self.bytes_per_slot

    def __str__(self) -> str:
        each = readable(self.bytes_per_block or self.bytes_per_slot)
        sessions = f", up to {self.num_slots} sessions" if self.block_size else ""
        return f"KV cache: {self.shape}, {each} each, {readable(self.total_bytes)} in all{sessions}"


def blocks_of(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold so many tokens."""
    return -(-num_tokens // block_size)


def slot_bytes(
    config: Any, max_length: int, dtype: ElementType, tensor_parallel_size: int = 1
) -> int:
    """Return the bytes of a slot of `max_length` tokens on each device of a tensor-parallel group.

    `config` is a model's configuration; `dtype` the one it runs in. Under tensor parallelism a
    device holds its share of the KV heads, at least one, if transformers' plan for the model splits
    them.
    """
    config = config.get_text_config()
    ranks = tensor_parallel_size if splits_heads(config) else 1
    per_token = sum(
        2 * heads_per_rank(kv_heads, ranks) * dim for _, kv_heads, dim in layer_heads(config)
    )
    return max_length * per_token * dtype.itemsize


def plan_slots(
    bytes_per_slot: int, budget_bytes: int, max_sessions: int, spare_bytes: int = 0
) -> int:
    """Return how many slots, one per session, fit into the budget; at most `max_sessions`.

    Raises `ConfigError` if not even one fits.
    """
    fitting, least = (budget_bytes - spare_bytes) // bytes_per_slot, bytes_per_slot + spare_bytes
    if fitting < 1:
        raise ConfigError(
            f"--kv-cache-memory-bytes {budget_bytes}: one session needs {least} bytes "
            f"({readable(least)}); raise it, or lower --max-model-len"
        )
    return min(max_sessions, fitting)


def plan_kv_cache(
    config: Any,
    max_length: int,
    dtype: ElementType,
    max_sessions: int,
    budget_bytes: int = 0,
    tensor_parallel_size: int = 1,
    block_size: int = 0,
) -> KVCachePlan:
    """Plan the cache of a service: a slot for each session, or as many as fit into a budget.

    With blocks of `block_size` tokens, every session has a slot, and the budget limits the blocks.
    `budget_bytes` is per device (0: no limit). Raises `ConfigError`.
    """
    blocks = blocks_of(max_length, block_size) if block_size else 0
    size, spare = (
        slot_bytes(config, length, dtype, tensor_parallel_size)
        for length in (blocks * block_size or max_length, block_size or SPARE_ROWS)
    )
    slots = max_sessions
    if budget_bytes:
        slots = plan_slots(size, budget_bytes, max_sessions, spare)
    if not block_size:
        return KVCachePlan(slots, max_length, size, spare)
    fitting = (budget_bytes - spare) // spare if budget_bytes else max_sessions * blocks
    num_blocks = min(fitting, max_sessions * blocks)
    return KVCachePlan(max_sessions, max_length, size, spare, block_size, num_blocks)


def readable(num_bytes: int) -> str:
    """Format bytes as in "12.6 MB", with three digits; units are powers of 1000."""
    value, unit = float(num_bytes), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"
