"""The KV cache leaves room for draft heads: their weights, hidden rows and caches."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from flyspec.config import DraftSettings, VerifySettings
from flyspec.engine.cache_size import check_fits, plan_cache
from flyspec.engine.head_memory import HeadMemory, head_memory
from flyspec.errors import ConfigError
from tests.engine.test_cache_size import (
    CPU,
    CUDA,
    GB,
    llama,
    loaded,
    pretend,
    write_header,
)

__all__ = ["llama"]  # a fixture
TARGET = LlamaConfig(
    hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8
)
BF16, F32 = torch.bfloat16, torch.float32
EAGLE3 = {
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 4096, "num_hidden_layers": 1,
    "num_attention_heads": 32, "num_key_value_heads": 8, "draft_vocab_size": 32_000,
}  # fmt: skip


def head(folder, config, name="model.safetensors", **tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_header(folder / name, **{
        tensor: ("BF16", [count], 2 * count) for tensor, count in tensors.items()
    })  # fmt: skip
    return folder


def of(heads, dtype=BF16, device=CPU, **settings):
    named = " ".join(f"h{i}={folder}" for i, folder in enumerate(heads))
    settings = VerifySettings(model="target", heads=named, **settings)
    return head_memory(settings, TARGET, dtype, device, 8192)


def test_each_kind_of_head(tmp_path: Path) -> None:
    eagle = head(tmp_path / "eagle", EAGLE3, **{"fc.weight": 1000, "midlayer.mlp": 500})
    assert of([eagle]) == (3000, 0, 2 * 8 * 128 * 2)
    assert of([eagle], F32) == (6000, 0, 2 * 8 * 128 * 4)
    layers = {key: value for key, value in EAGLE3.items() if key != "architectures"}
    speculators = head(
        tmp_path / "speculators",
        {"speculators_model_type": "eagle3",
         "transformer_layer_config": layers | {"head_dim": 64, "num_hidden_layers": 2}},
        **{"layers.0.mlp": 7},
    )  # fmt: skip
    assert of([speculators]) == (14, 0, 2 * 2 * 8 * 64 * 2)
    medusa = head(
        tmp_path / "medusa", {"medusa_num_heads": 3}, "medusa_lm_head.safetensors", **{"0.1": 11}
    )
    assert of([medusa]) == (22, 0, 0)
    # An MTP layer lies among the target's own layers, which are counted already.
    mtp = head(
        tmp_path / "mtp", TARGET.to_dict() | {"num_nextn_predict_layers": 1},
        **{"model.layers.31.mlp": 100, "model.layers.32.eh_proj": 5, "lm_head.weight": 9},
    )  # fmt: skip
    assert of([mtp]) == (10, 0, 2 * 8 * 128 * 2)
    qwen = head(tmp_path / "qwen", TARGET.to_dict(), **{"mtp.fc": 6, "model.layers.0.mlp": 100})
    assert of([qwen]) == (12, 0, 2 * 8 * 128 * 2)
    assert of([eagle, medusa]).weights == 3022
    assert of([tmp_path / "none"]) == of([]) == HeadMemory()


def test_a_gpu_keeps_the_hidden_rows_of_a_step(tmp_path: Path) -> None:
    eagle = head(tmp_path / "eagle", EAGLE3, fc=1)
    rows = of([eagle], device=CUDA, max_num_batched_tokens=2048).hidden
    assert rows == 2048 * 33 * 4096 * 2
    assert of([eagle], device=CUDA, max_num_batched_tokens=99_999).hidden == 4 * rows


def test_a_drafter_has_no_heads() -> None:
    assert head_memory(DraftSettings(), TARGET, BF16, CUDA, 8192) == HeadMemory()


def settings_of(folder: Path, **given) -> VerifySettings:
    given = {"block_size": 0, **given}
    return VerifySettings(
        model="llama", tensor_parallel_size=4, heads=f"eagle3={folder}", **given
    )  # fmt: skip


def test_the_plan_has_heads_in_it(
    llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    eagle = head(tmp_path / "eagle", EAGLE3 | {"hidden_size": 8192}, fc=GB)
    pretend(monkeypatch, total=85, free=84, own=1)
    check_fits(settings_of(eagle, max_sessions=64), llama)
    assert caplog.messages == [
        "memory of cuda:0: weights 35.3 GB + CUDA 1 GB + activations 1.13 GB + heads 2 GB + hidden "
        "rows 2.72 GB + KV cache 2 slots x 131072 tokens 21.5 GB + caches of heads 2.15 GB = "
        "65.8 GB of 76.5 GB (--gpu-memory-utilization 0.9 of 85 GB; 84 GB free)"
    ]
    pretend(monkeypatch, total=57, free=56, own=1)
    with pytest.raises(ConfigError, match=r"\+ caches of heads 1\.08 GB = 54 GB, but only"):
        check_fits(settings_of(eagle), llama)


@pytest.mark.parametrize("block_size", [0, 32])
def test_the_cache_leaves_room_for_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_size: int
) -> None:
    eagle = head(tmp_path / "eagle", EAGLE3 | {"hidden_size": 8192}, fc=GB)
    pretend(monkeypatch, total=85, free=48, own=37)
    asked = settings_of(eagle, max_sessions=64, block_size=block_size)
    with_heads = plan_cache(loaded(), asked, 4)
    without = plan_cache(loaded(), settings_of(eagle).model_copy(
        update={"heads": "", "max_sessions": 64, "block_size": block_size}), 4)  # fmt: skip
    info = loaded().info
    memory = head_memory(asked, loaded().model.config, BF16, CUDA, info.context_length)
    tokens = with_heads.total_bytes * with_heads.max_length // with_heads.bytes_per_slot
    used = with_heads.total_bytes + tokens * memory.bytes_per_token + sum(memory.taken.values())
    room = 0.9 * 85 * GB - 37 * GB
    assert with_heads.total_bytes < without.total_bytes <= room
    least = with_heads.bytes_per_block or with_heads.bytes_per_slot
    assert room - 1.2 * least < used <= room
