"""Models that the native step serves, as a configuration shows them; `trial` checks the rest."""

from __future__ import annotations

from typing import Any

from flyspec.engine.native.library import Library, find

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


def library_for(
    name: str, config: Any, device: str, dtype: str, block_size: int | None
) -> Library | str:
    """Return the compiled step for a model of a single-process service, or why there is none.

    `block_size` is `--block-size`. Before it serves, the step must also pass its trial.
    """
    if not device.startswith("cpu"):
        return f"{name} is on {device}"
    if dtype != "bfloat16":
        return f"{name} is in {dtype}, and the native step supports only bfloat16"
    if reason := unsupported(config):
        return f"{name}: {reason}"
    if block_size:
        return f"--block-size {block_size}: the native step supports only 0"
    library = find()
    return f"no native step: {library}" if isinstance(library, str) else library


def serves_natively(config: Any) -> bool:
    """True if the native step is available and supports models of this configuration."""
    return unsupported(config) is None and isinstance(find(), Library)
