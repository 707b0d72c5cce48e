"""Attention and KV heads of a configuration, and how a tensor-parallel group shares them. No torch.

As in vLLM: with at most as many ranks as KV heads, each rank holds equally many heads. With more,
rank r of `size` holds only head r // (size / heads), the one that its query heads attend with.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

COLWISE = "colwise"
REPLICATED = "flyspec_replicated_kv_heads"
"""A parallel style of ours (`kv_heads`)."""


def layer_heads(text_config: Any) -> Iterator[tuple[int, int, int]]:
    """Yield the attention heads, KV heads and head size of each layer."""
    layers = getattr(text_config, "per_layer_config", None)
    for layer in layers or [text_config] * text_config.num_hidden_layers:
        heads = layer.num_attention_heads
        kv_heads = getattr(layer, "num_key_value_heads", None) or heads
        yield heads, kv_heads, getattr(layer, "head_dim", None) or layer.hidden_size // heads


def splits_heads(text_config: Any) -> bool:
    """True if the tensor-parallel plan splits the KV heads among the ranks."""
    plan = getattr(text_config, "base_model_tp_plan", None) or {}
    projections = (".k_proj", ".query_key_value")
    return any(
        key.endswith(projections) and style in (COLWISE, REPLICATED) for key, style in plan.items()
    )


def can_split(heads: int, kv_heads: int, size: int) -> bool:
    """True if `size` ranks can get equally many attention heads, and all the KV heads of those."""
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def heads_per_rank(kv_heads: int, size: int) -> int:
    """Return the KV heads of a layer that each of `size` ranks holds; requires `can_split`."""
    return max(1, kv_heads // size)


def replicated_numbers(text_config: Any, size: int) -> int:
    """Return how many weights of KV heads a rank holds beyond an even share."""
    if not splits_heads(text_config):
        return 0
    hidden: int = text_config.hidden_size
    return sum(
        2 * dim * hidden * (heads_per_rank(kv_heads, size) * size - kv_heads) // size
        for _, kv_heads, dim in layer_heads(text_config)
    )
