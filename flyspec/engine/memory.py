"""Plans the KV cache before it is allocated: bytes per slot, and number of slots."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flyspec.engine.kv_heads import heads_per_rank, layer_heads, splits_heads
from flyspec.engine.slot_cache import SPARE_ROWS
from flyspec.errors import ConfigError


class KVCachePlan(NamedTuple):
    """Slots of a KV cache, the tokens that each holds, and its bytes on one device.

    `spare_bytes` are those after the last slot (`slot_cache.SPARE_ROWS`).
    """

    num_slots: int
    max_length: int
    bytes_per_slot: int
    spare_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.num_slots * self.bytes_per_slot + self.spare_bytes

    def __str__(self) -> str:
        return (
            f"KV cache: {self.num_slots} slots x {self.max_length} tokens, "
            f"{readable(self.bytes_per_slot)} each, {readable(self.total_bytes)} in all"
        )


def slot_bytes(
    config: Any, max_length: int, dtype: torch.dtype, tensor_parallel_size: int = 1
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
    dtype: torch.dtype,
    max_sessions: int,
    budget_bytes: int = 0,
    tensor_parallel_size: int = 1,
) -> KVCachePlan:
    """Plan the cache of a service: a slot for each session, or as many as fit into a budget.

    `budget_bytes` is per device (0: no limit). Raises `ConfigError`.
    """
    size, spare = (
        slot_bytes(config, length, dtype, tensor_parallel_size)
        for length in (max_length, SPARE_ROWS)
    )
    slots = max_sessions
    if budget_bytes:
        slots = plan_slots(size, budget_bytes, max_sessions, spare)
    return KVCachePlan(slots, max_length, size, spare)


def readable(num_bytes: int) -> str:
    """Format bytes as in "12.6 MB", with three digits; units are powers of 1000."""
    value, unit = float(num_bytes), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"
