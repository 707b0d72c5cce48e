"""Kinds of models that cannot be served, recognized by the text of their config.json.

Needs neither torch nor transformers, so that such a model is refused at once. `supported` decides
the rest from transformers' configuration, `trial` from the model itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
