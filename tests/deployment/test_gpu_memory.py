"""Memory of the GPU overlays by the services' own planner."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from flyspec.config import ModelServerSettings
from flyspec.engine.cache_size import Fit, KVCachePlan, plan_fit, plan_kv_cache
from flyspec.engine.checkpoint import Checkpoint
from flyspec.engine.device_memory import OUTSIDE_TORCH, DeviceMemory
from flyspec.engine.supported import check_tensor_parallel
from flyspec.errors import ConfigError
from flyspec_lab.bench.shapes import config_of
from tests.deployment.rendered import ROOT, read

LLAMA_70B = config_of("llama-70b")
CONTEXT_LENGTH = 131_072
# Configuration, parameters, and the memory that the GPU's driver reports.
MODELS = {
    "verify": (LLAMA_70B, 70_553_706_496, 84_970_000_000),  # A100 of 80 GB
    "draft": (config_of("llama-1b"), 1_235_814_400, 23_600_000_000),  # L4 of 24 GB
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


def planned(component: str, settings: ModelServerSettings) -> tuple[Fit, KVCachePlan]:
    config, parameters, total = MODELS[component]
    ranks = getattr(settings, "tensor_parallel_size", 1)
    device, length = torch.device("cuda", 0), settings.max_model_len
    model = Checkpoint("model", config, torch.bfloat16, device, length, ranks, Path())
    memory = DeviceMemory(total, total - OUTSIDE_TORCH, OUTSIDE_TORCH)
    fit, plan = plan_fit(settings, model, memory, 2 * parameters)
    fit.require_one()
    return fit, plan()


@pytest.mark.parametrize("component", MODELS)
def test_all_sessions_of_the_overlay_fit(component: str) -> None:
    settings = settings_of(component)
    fit, plan = planned(component, settings)
    assert plan.num_slots == settings.max_sessions
    assert plan.max_length == settings.max_model_len >= 8192
    # And a step may take twice what is estimated.
    assert plan.total_bytes + fit.taken["activations"] <= fit.left


def test_target_and_drafters_hold_the_same_sessions() -> None:
    verify, draft = map(settings_of, MODELS)
    assert draft.max_sessions >= verify.max_sessions
    assert draft.max_model_len == verify.max_model_len


def test_without_a_length_few_sessions_would_fit() -> None:
    """With the model's whole context, 64 sessions would need 687 GB per GPU."""
    changes = {"max_model_len": CONTEXT_LENGTH, "max_sessions": 64, "block_size": 0}
    whole = settings_of("verify").model_copy(update=changes)
    assert (
        plan_kv_cache(LLAMA_70B, CONTEXT_LENGTH, torch.bfloat16, 64, 0, 4).total_bytes // 10**9
        == 687
    )
    assert planned("verify", whole)[1].num_slots == 3
    alone = whole.model_copy(update={"tensor_parallel_size": 1})
    with pytest.raises(ConfigError, match=r"even one session fits .* raise --tensor-parallel-size"):
        planned("verify", alone)


def test_sixteen_ranks_of_two_nodes_hold_a_kv_head_each() -> None:
    """The overlay multi-node: half the heads of four ranks, not a quarter."""
    four, settings = settings_of("verify"), settings_of("verify", "multi-node")
    assert (four.tensor_parallel_size, settings.tensor_parallel_size) == (4, 16)
    check_tensor_parallel("llama", LLAMA_70B, 16)
    fit, plan = planned("verify", settings)
    assert plan.num_slots == settings.max_sessions
    assert plan.bytes_per_slot == 80 * 128 * 2 * 2 * settings.max_model_len
    assert plan.bytes_per_slot * 2 == planned("verify", four)[1].bytes_per_slot
    # A sixteenth of the weights, but an eighth of what makes keys and values.
    shared = 2 * 70_553_706_496 // 16
    assert fit.taken["weights"] == shared + 80 * 2 * 128 * 8192 * 2 // 2
    assert plan.total_bytes + fit.taken["activations"] <= fit.left


def test_packages_to_carry_are_of_the_versions_tested() -> None:
    def names(file: Path) -> set[str]:
        lines = file.read_text().splitlines()
        return {re.split("==", line)[0].lower().replace("_", "-") for line in lines
                if line and not line.startswith("#")}  # fmt: skip

    assert names(ROOT / "bench" / "gpu" / "wheels.txt") <= names(ROOT / "constraints.txt")
