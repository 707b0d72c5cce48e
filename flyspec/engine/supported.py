"""Models that can be served, as far as their configuration shows; `trial` checks the rest.

Needs neither torch nor transformers, so that other kinds of models are refused at once, by the
text of their config.json.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from flyspec.engine.heads import can_split, layer_heads, splits_heads
from flyspec.errors import ConfigError

TEXT_OF_MULTIMODAL = frozenset({"gemma3", "gemma4"})
"""Multimodal `model_type`s that transformers loads as text decoders, served for text alone."""

_AUDIO = {
    "audio_config", "audio_encoder", "audio_encoder_config", "audio_token_id", "num_mel_bins",
    "feat_extract_norm", "acoustic_tokenizer_config", "sampling_rate", "codec_config",
}  # fmt: skip
_VISION = {
    "vision_config", "image_size", "image_token_id", "image_token_index", "mm_vision_tower",
}  # fmt: skip
_RECURRENT = {
    "state_size", "ssm_state_size", "ssm_cfg", "mamba_d_state", "mamba_num_heads", "lru_width",
    "conv_L_cache", "linear_num_value_heads", "linear_num_heads", "linear_attn_config",
    "linear_attn_alpha_factor", "conv_kernel_size",
}  # fmt: skip
"""Keys of convolutions and recurrences between tokens."""
_RECURRENT_TYPES = {"rwkv", "xlstm"}
_RECURRENT_LAYERS = {"linear_attention", "conv", "mamba", "mamba2", "recurrent", "hybrid"}
"""Names of such layers in a list of layers."""

_TASKS = {
    "ForMaskedLM": "an encoder that fills in masked tokens",
    "ForSequenceClassification": "a classifier or reward model",
    "ForTokenClassification": "a classifier of tokens",
    "ForQuestionAnswering": "a model that marks answers in a text",
    "ForMultipleChoice": "a classifier",
    "ForImageClassification": "a classifier of images",
    "ForCTC": "a speech recognizer",
    "ForPreTraining": "an encoder in pretraining",
}
"""Kinds of models, by the ending of their class."""


def kind_of(config: Mapping[str, Any]) -> str | None:
    """Return what a model is, if its config.json shows that it is no text decoder to be served.

    As in "it is" + "an audio model"; None if nothing speaks against it.
    """
    model_type = str(config.get("model_type", ""))
    keys = _keys(config)
    if model_type not in TEXT_OF_MULTIMODAL:
        if keys & _AUDIO:
            return f"an audio model ({model_type})"
        if keys & _VISION:
            return f"a vision-language or image model ({model_type})"
    if config.get("is_encoder_decoder"):
        return f"an encoder-decoder model ({model_type})"
    if model_type in _RECURRENT_TYPES or keys & _RECURRENT or _layers(config) & _RECURRENT_LAYERS:
        return (
            f"a state-space or hybrid model ({model_type}), whose recurrent state cannot be "
            "rolled back"
        )
    for name in config.get("architectures") or ():
        for ending, task in _TASKS.items():
            if str(name).endswith(ending):
                return f"{task} ({name})"
    if "type_vocab_size" in config and not config.get("is_decoder"):
        return f"an encoder ({model_type}), which attends to later tokens"
    return None


def _keys(config: Mapping[str, Any]) -> set[str]:
    """The keys that are set, also in nested configurations."""
    found = {key for key, value in config.items() if value is not None}
    for value in config.values():
        if isinstance(value, Mapping):
            found |= _keys(value)
    return found


def _layers(config: Mapping[str, Any]) -> set[str]:
    """The kinds of layers that a configuration lists."""
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, Mapping) else [config]
    return {
        str(kind)
        for part in parts
        for key in ("layer_types", "layers_block_type", "block_types")
        for kind in part.get(key) or ()
    }


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
