"""The overlay gpu fits on the GPUs it names, according to the services' own calculation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig

from flyspec.config import DraftSettings, ModelServerSettings, VerifySettings
from flyspec.engine import cache_size
from flyspec.engine.cache_size import Fit, check_fits
from flyspec.engine.checkpoint import Checkpoint
from flyspec.engine.device_memory import OUTSIDE_TORCH, DeviceMemory
from flyspec.engine.memory import KVCachePlan, plan_kv_cache
from flyspec.engine.supported import check_tensor_parallel
from flyspec.errors import ConfigError
from tests.deployment.rendered import ROOT, read

LLAMA: dict[str, Any] = {
    "vocab_size": 128_256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "dtype": torch.bfloat16,
}
LLAMA_70B = LlamaConfig(
    hidden_size=8192,
    intermediate_size=28_672,
    num_hidden_layers=80,
    num_attention_heads=64,
    **LLAMA,
)
LLAMA_1B = LlamaConfig(
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    tie_word_embeddings=True,
    **LLAMA,
)
# Name, configuration, parameters, and the memory that the GPU's driver reports.
MODELS = {
    "verify": (VerifySettings, LLAMA_70B, 70_553_706_496, 84_970_000_000),  # A100 of 80 GB
    "draft": (DraftSettings, LLAMA_1B, 1_235_814_400, 23_600_000_000),  # L4 of 24 GB
}


def settings_of(component: str, overlay: str = "gpu") -> Any:
    """As in the overlay's own file; `multi-node` merges a few into those of `gpu`."""
    lines = (ROOT / "k8s" / "overlays" / "gpu" / f"{component}.env").read_text().splitlines()
    if overlay != "gpu":
        file = ROOT / "k8s" / "overlays" / overlay / "kustomization.yaml"
        generated = yaml.safe_load(file.read_text())["configMapGenerator"]
        lines += [line for c in generated if c["name"] == f"{component}-config"
                  for line in c["literals"]]  # fmt: skip
    return read(component, dict(line.split("=", 1) for line in lines if line[:1] not in ("", "#")))


def planned(
    component: str, settings: ModelServerSettings, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Fit, KVCachePlan]:
    """Return the service's plan before it reads weights: the calculation, and its cache."""
    _, config, parameters, total = MODELS[component]
    size = getattr(settings, "tensor_parallel_size", 1)
    header = {"w": {"dtype": "BF16", "shape": [parameters], "data_offsets": [0, 0]}}
    text = json.dumps(header).encode()
    weights = folder / "model.safetensors"
    weights.write_bytes(len(text).to_bytes(8, "little") + text)
    memory = DeviceMemory(total, total - OUTSIDE_TORCH, OUTSIDE_TORCH)
    monkeypatch.setattr(cache_size, "device_memory", lambda device: memory)
    told: list[tuple[Fit, KVCachePlan]] = []
    monkeypatch.setattr(Fit, "tell", lambda fit, plan: told.append((fit, plan)))
    length = settings.max_model_len or config.max_position_embeddings
    device = torch.device("cuda", 0)
    check_fits(
        settings, Checkpoint(component, config, torch.bfloat16, device, length, size, weights)
    )
    return told[0]


@pytest.mark.parametrize("component", MODELS)
def test_all_sessions_of_the_overlay_fit(
    component: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(component)
    fit, plan = planned(component, settings, tmp_path, monkeypatch)
    assert plan.num_slots == settings.max_sessions
    assert plan.max_length == settings.max_model_len >= 8192
    # And a step may take twice what is estimated.
    assert plan.total_bytes + fit.taken["activations"] <= fit.left


def test_target_and_drafters_hold_the_same_sessions() -> None:
    verify, draft = map(settings_of, MODELS)
    assert draft.max_sessions >= verify.max_sessions
    assert draft.max_model_len == verify.max_model_len


def test_without_a_length_few_sessions_would_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the model's whole context, 64 sessions would need 687 GB per GPU."""
    changes = {"max_model_len": 0, "max_sessions": 64, "block_size": 0}
    whole = settings_of("verify").model_copy(update=changes)
    assert plan_kv_cache(LLAMA_70B, 131_072, torch.bfloat16, 64, 0, 4).total_bytes // 10**9 == 687
    _, plan = planned("verify", whole, tmp_path, monkeypatch)
    assert plan.num_slots == 3
    alone = whole.model_copy(update={"tensor_parallel_size": 1})
    with pytest.raises(ConfigError, match=r"even one session fits .* raise --tensor-parallel-size"):
        planned("verify", alone, tmp_path, monkeypatch)


def test_sixteen_ranks_of_two_nodes_hold_a_kv_head_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The overlay multi-node: half the heads of four ranks, not a quarter."""
    four, settings = settings_of("verify"), settings_of("verify", "multi-node")
    assert (four.tensor_parallel_size, settings.tensor_parallel_size) == (4, 16)
    check_tensor_parallel("llama", LLAMA_70B, 16)
    fit, plan = planned("verify", settings, tmp_path, monkeypatch)
    assert plan.num_slots == settings.max_sessions
    assert plan.bytes_per_slot == 80 * 128 * 2 * 2 * settings.max_model_len
    assert (
        plan.bytes_per_slot * 2 == planned("verify", four, tmp_path, monkeypatch)[1].bytes_per_slot
    )
    # A sixteenth of the weights, but an eighth of what makes keys and values.
    shared = 2 * 70_553_706_496 // 16
    assert fit.taken["weights"] == shared + 80 * 2 * 128 * 8192 * 2 // 2
    assert plan.total_bytes + fit.taken["activations"] <= fit.left
