"""Which models are refused by their configuration alone: real configurations of many families."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from flyspec.engine.configuration import check_kind, own_context_length
from flyspec.engine.supported import TEXT_OF_MULTIMODAL, check_config, kind_of
from flyspec.errors import ConfigError
from tests.engine.test_model_support import SERVED

KINDS = {
    "an encoder-decoder model": ("t5", "bart", "pegasus", "marian", "mbart", "led", "umt5"),
    "a state-space or hybrid model": (
        "mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "zamba2", "rwkv", "recurrent_gemma",
        "nemotron_h", "qwen3_next", "qwen3_5_text", "lfm2", "granitemoehybrid", "kimi_linear",
    ),
    "a vision-language or image model": (
        "llava", "qwen2_5_vl", "qwen3_vl", "mistral3", "mllama", "idefics3", "paligemma",
        "llama4", "internvl", "clip", "vit",
    ),
    "an audio model": ("whisper", "qwen2_audio", "wav2vec2", "voxtral", "musicgen"),
    "an encoder": ("bert", "roberta", "electra", "xlm-roberta", "camembert"),
}  # fmt: skip
ACCEPTED = (
    *SERVED, "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gemma3_text", "gemma4",
    "seed_oss", "helium", "glm", "nanochat", "ministral", "arcee", "apertus", "olmo",
)  # fmt: skip


def saved(model_type: str) -> dict[str, Any]:
    """What config.json of such a model says."""
    document: dict[str, Any] = json.loads(CONFIG_MAPPING[model_type]().to_json_string())
    return document


@pytest.mark.parametrize(
    ("kind", "model_type"), [(kind, name) for kind, names in KINDS.items() for name in names]
)
def test_a_family_is_refused_by_name(kind: str, model_type: str) -> None:
    found = kind_of(saved(model_type))
    assert found is not None
    assert found.startswith(kind)
    assert model_type in found
    with pytest.raises(ConfigError, match=r"--model m: cannot be served: .*; use a decoder with"):
        check_kind("m", CONFIG_MAPPING[model_type]())


@pytest.mark.parametrize("model_type", ACCEPTED)
def test_a_decoder_is_not_refused(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type]()
    assert kind_of(saved(model_type)) is None
    check_kind("m", config)
    check_config("m", config.get_text_config(), min(512, own_context_length(config)))


def test_what_is_refused_early_would_be_refused_later() -> None:
    """By its configuration with transformers' defaults, or since it is no causal model."""
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if model_type in ("gemma4_assistant", *TEXT_OF_MULTIMODAL):  # the first has no default
            continue
        if kind := kind_of(saved(model_type)):
            assert not kind.startswith("a classifier"), model_type
            assert model_type not in SERVED


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("LlamaForSequenceClassification", "a classifier or reward model"),
        ("BertForMaskedLM", "an encoder that fills in masked tokens"),
        ("LlamaForCausalLM", None),
        ("LlamaModel", None),
    ],
)
def test_a_head_for_another_task_is_refused(architecture: str, task: str | None) -> None:
    found = kind_of({"model_type": "llama", "architectures": [architecture]})
    assert found == (task and f"{task} ({architecture})")


def test_of_other_types_transformers_has_no_causal_model() -> None:
    with pytest.raises(ConfigError, match="no causal language model of type distilbert"):
        check_kind("m", CONFIG_MAPPING["distilbert"]())
