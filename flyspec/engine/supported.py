"""Which models can be served, as far as their configuration shows; `trial` checks the rest."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from flyspec.engine.heads import can_split, layer_heads, splits_heads
from flyspec.errors import ConfigError

log = logging.getLogger(__name__)

SERVED_LAYERS = {"full_attention", "sliding_attention"}
_INSTEAD = (
    "use a decoder with plain, grouped or sliding-window attention, such as Llama, Qwen 2 or 3, "
    "Mistral, Gemma 2 or 3"
)


def check_config(name: str, config: Any, context_length: int) -> None:
    """Reject a text model whose configuration shows it cannot be served. Raises `ConfigError`.

    That is: state that cannot be rolled back, caches shared by layers, attention to later tokens,
    or positions whose meaning depends on the length of the whole sequence.
    """
    kinds = set(getattr(config, "layer_types", None) or ()) - SERVED_LAYERS
    if kinds:
        raise unserved(name, f"it has layers of kind {', '.join(sorted(map(str, kinds)))}")
    if getattr(config, "num_kv_shared_layers", 0):
        raise unserved(name, "some of its layers share their keys and values")
    if getattr(config, "is_encoder_decoder", False):
        raise unserved(name, "it has an encoder")
    if getattr(config, "use_bidirectional_attention", None) or not getattr(
        config, "is_causal", True
    ):
        raise unserved(name, "its attention is bidirectional")
    if not getattr(config, "num_hidden_layers", None):
        raise unserved(name, "its configuration does not give the number of layers")
    for limit, kind in _rope_limits(config):
        if context_length > limit:
            raise ConfigError(
                f"--model {name}: beyond {limit} tokens its rotary embedding (type {kind}) rotates "
                "keys by a different angle than those cached before; "
                f"use --max-model-len {limit} or less"
            )


def check_tensor_parallel(name: str, config: Any, size: int) -> None:
    """Reject a number of ranks that cannot share the model's heads. Raises `ConfigError`.

    It must divide the attention heads, and divide the KV heads or be a multiple of them
    (`heads`). Other dimensions need not divide: the last rank's share is then smaller.
    """
    text_config = config.get_text_config()
    if not getattr(text_config, "base_model_tp_plan", None):
        raise ConfigError(
            f"--tensor-parallel-size {size}: transformers has no plan for sharding a "
            f"{text_config.model_type} model; use --tensor-parallel-size 1"
        )
    if not splits_heads(text_config):
        return  # every rank holds all heads
    check_heads(name, {(heads, kv) for heads, kv, _ in layer_heads(text_config)}, size)


def check_heads(name: str, layers: set[tuple[int, int]], size: int) -> None:
    """Reject a number of ranks that cannot share these attention heads and KV heads of layers."""
    least = min(kv_heads for _, kv_heads in layers)

    def works(ranks: int) -> bool:
        # Heads are replicated in all layers or in none.
        return all(can_split(*layer, ranks) for layer in layers) and (
            ranks <= least or len({kv_heads for _, kv_heads in layers}) == 1
        )

    if not works(size):
        most = min(heads for heads, _ in layers)
        sizes = [str(n) for n in range(1, most + 1) if works(n)]
        counts = " or ".join(
            f"{heads} attention heads and {kv_heads} KV heads" for heads, kv_heads in sorted(layers)
        )
        raise ConfigError(
            f"--tensor-parallel-size {size}: {name} has {counts}, which {size} ranks cannot share "
            f"evenly; sizes that work: {', '.join(sizes)}"
        )


def check_length(max_model_len: int, limit: int | None) -> None:
    """Reject a context longer than the model's own. Raises `ConfigError`."""
    if limit and max_model_len > limit:
        raise ConfigError(
            f"--max-model-len {max_model_len}: the model's own limit is {limit}; "
            f"use {limit} or less, or 0"
        )


def within_limit(max_model_len: int, limit: int) -> int:
    """Return a drafter's context: it merely proposes nothing beyond its own limit."""
    if max_model_len > limit:
        log.warning("--max-model-len %d exceeds the draft model's own limit; using %d",
                    max_model_len, limit)  # fmt: skip
    return min(max_model_len, limit)


def unserved(name: str, reason: str) -> ConfigError:
    """Return the error for a model that cannot be served from slots."""
    return ConfigError(f"--model {name}: cannot be served: {reason}; {_INSTEAD}")


def _rope_limits(config: Any) -> Iterator[tuple[int, str]]:
    """Lengths beyond which rotary embeddings change for all positions, with their types."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):
        if isinstance(rope, Mapping):
            kind, own = rope.get("rope_type"), rope.get("original_max_position_embeddings")
            if kind == "longrope" and own:
                yield int(own), kind
            elif kind is not None and "dynamic" in kind:
                yield int(config.max_position_embeddings), kind
