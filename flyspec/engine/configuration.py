"""Decisions by a model's configuration before its weights are read: whether and how it is served.

Imports transformers, whose configurations need no torch; neither does this module.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from flyspec.engine.checkpoint import Checkpoint
from flyspec.engine.devices import AnyDevice, NamedType, choose_dtype
from flyspec.engine.native.family import serves_natively
from flyspec.engine.supported import (
    check_config,
    check_length,
    check_tensor_parallel,
    kind_of,
    unserved,
)
from flyspec.errors import ConfigError
from flyspec.model_files import find_weights, model_source


def read_config(name: str) -> tuple[str, Any]:
    """Return where a model is loaded from, and its configuration. Raises `ConfigError`."""
    source = model_source(name)
    try:
        return source, AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # safetensors, huggingface_hub and tokenizers have their own bases
        raise unreadable(name, error) from error


def unreadable(name: str, error: Exception) -> ConfigError:
    """Return the error for a model that transformers cannot read."""
    if "trust_remote_code" in str(error):
        return ConfigError(
            f"--model {name}: requires custom code (auto_map), which is never run; use a model "
            "whose architecture is built into transformers"
        )
    reason = " ".join(str(error).split()) or repr(error)
    return ConfigError(f"--model {name}: cannot be loaded: {reason:.300}")


def own_context_length(config: Any) -> int:
    """Return the longest sequence, in tokens, that a model's configuration allows."""
    return int(getattr(config.get_text_config(), "max_position_embeddings", 0) or 2048)


def check_kind(name: str, config: Any) -> None:
    """Reject a model that is no text decoder, by its own configuration. Raises `ConfigError`."""
    if kind := kind_of(config.to_dict()):
        raise unserved(name, f"it is {kind}")
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise unserved(
            name, f"transformers has no causal language model of type {config.model_type}"
        )


def plan_checkpoint(
    name: str,
    config: Any,
    device: AnyDevice,
    dtype: str,
    find: Callable[[str], Path | None],
    max_model_len: int = 0,
    tensor_parallel_size: int = 1,
) -> Checkpoint:
    """Return what will be loaded, in a data type known by its name. Raises `ConfigError`.

    `find` returns the path of one of the model's files.
    """
    limit = own_context_length(config)
    check_length(max_model_len, limit)
    check_kind(name, config)
    check_config(name, config.get_text_config(), max_model_len or limit)
    if tensor_parallel_size > 1:
        check_tensor_parallel(name, config, tensor_parallel_size)
    weights = find_weights(name, find, getattr(config, "transformers_weights", None))
    native = tensor_parallel_size == 1 and serves_natively(config)
    run_in = NamedType(choose_dtype(dtype, device.type, config, native))
    length = max_model_len or limit
    return Checkpoint(name, config, run_in, device, length, tensor_parallel_size, weights)
