"""Which models the native step serves, as far as a configuration shows; `trial` checks the rest."""

from __future__ import annotations

from typing import Any

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""transformers' `model_type`s: RMS norms, rotary embeddings, grouped heads, SiLU-gated MLP."""
ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles depend only on the position."""
HEAD_STEP, MAX_HEAD = 16, 512


def unsupported(config: Any) -> str | None:
    """Return why the native step does not serve a model of this configuration; None if it does."""
    if config.model_type not in FAMILIES:
        return f"no native step for {config.model_type} models"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    dim = head_dim(config)
    if dim % HEAD_STEP or dim > MAX_HEAD:
        return f"its head size {dim} is not a multiple of {HEAD_STEP} up to {MAX_HEAD}"
    if config.hidden_size % 2:
        return f"its hidden size {config.hidden_size} is odd"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in ROPES:
        return f"its rotary embedding is of type {rope}"
    return None


def head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", 0) or config.hidden_size // config.num_attention_heads)
