"""`flyspec plan`: shapes from configurations, devices, and the gain by calculation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flyspec import bundled
from flyspec.errors import ConfigError
from flyspec.planning.devices import DEVICES, READING, DeviceGroup, read_group
from flyspec.planning.shapes import Shape, shape_of
from flyspec.planning.speed import Placed, SpeedPlan
from tests.cli.processes import invoke

LLAMA = {
    "model_type": "llama", "dtype": "bfloat16", "vocab_size": 96, "hidden_size": 16,
    "num_hidden_layers": 2, "intermediate_size": 24, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
ATTENTION = 2 * (16 * 16 + 16 * 8)
MLP = 3 * 16 * 24
NORMS = 5 * 16
EMBEDDINGS = 96 * 16


def shape(folder: Path, config: dict[str, object]) -> Shape:
    (folder / "config.json").write_text(json.dumps(config))
    return shape_of(str(folder))


def test_a_shape_comes_from_the_configuration_alone(tmp_path: Path) -> None:
    found = shape(tmp_path, LLAMA)
    layers = 2 * (ATTENTION + MLP) + NORMS
    assert found.weight_bytes == 2 * (layers + 2 * EMBEDDINGS)
    assert found.read_bytes(9) == 2 * (layers + EMBEDDINGS)
    assert found.flops(3) == 2 * 3 * (layers + EMBEDDINGS)
    assert found.kv_bytes == 2 * 2 * 2 * 2 * 4
    tied = shape(tmp_path, {**LLAMA, "tie_word_embeddings": True})
    assert tied.weight_bytes == tied.read_bytes(1) == found.read_bytes(1)


def test_rows_read_the_experts_that_they_choose(tmp_path: Path) -> None:
    found = shape(tmp_path, MIXTRAL)
    assert found.expert_bytes == 2 * 2 * 8 * MLP
    assert found.read_bytes(1) == found.dense_bytes + found.expert_bytes / 4
    assert found.read_bytes(2) == found.dense_bytes + found.expert_bytes * 7 / 16


def test_headers_of_weights_and_the_configuration_agree(tmp_path: Path) -> None:
    config = json.loads((bundled.TARGET / "config.json").read_text())
    assert shape(tmp_path, config) == shape_of(str(bundled.TARGET))


def test_devices_are_read_by_name_and_number() -> None:
    assert read_group("H100x4") == DeviceGroup("h100", DEVICES["h100"], 4)
    assert read_group("cpu", 17.5).device.bandwidth == 17.5e9
    with pytest.raises(ConfigError, match="--device cpu: has no known bandwidth"):
        read_group("cpu")
    with pytest.raises(ConfigError, match="must be one of a100, h100"):
        read_group("h100x0")


def pair(draft_bytes: int, acceptance: float, device: DeviceGroup) -> SpeedPlan:
    target, draft = (
        Placed(Shape(size, size, 0, 1.0, 0, 2), device) for size in (1000, draft_bytes)
    )
    return SpeedPlan(target, draft, acceptance, 1)


def test_the_gain_is_tokens_over_draft_and_verify_steps() -> None:
    plan = pair(100, 0.8, DeviceGroup("", READING))
    for r in plan.rounds:
        assert r.gain == pytest.approx((1 - 0.8 ** (r.k + 1)) / 0.2 / (1 + 0.1 * r.k))
    assert plan.best.k == 6
    assert "K = 6 is best: at most 2.47 times plain decoding (a draft step" in plan.verdict
    assert "K = 9 or more will not pay" in pair(400, 0.8, DeviceGroup("", READING)).verdict
    assert pair(600, 0.5, DeviceGroup("", READING)).verdict.startswith("drafting will not pay")


def test_computing_limits_where_rows_are_many() -> None:
    slow = READING._replace(flops=2.0)
    plan = pair(100, 1.0, DeviceGroup("", slow, 2))
    assert plan.plain_s == 1000 / 2
    assert plan.rounds[3].seconds == 4 * 50 + 5 * 1000 / 2 / 2


def test_the_command_prints_tables_or_a_document_and_says_what_it_needs() -> None:
    models = ["--model", str(bundled.TARGET), "--draft-model", str(bundled.DRAFT)]
    shown = invoke("plan", *models, "--device", "l4")
    assert shown.code == 0
    assert "1 x l4" in shown.out
    (document,) = invoke("plan", *models, "--device", "h100x2", "--json").documents
    assert document["target"]["devices"] == 2
    assert document["draft"]["devices"] == 1
    assert document["best_k"] in {r["k"] for r in document["rounds"]}
    assert document["verdict"] in invoke("plan", *models, "--device", "h100x2").out
    for wrong in [], [str(bundled.TARGET)], models:
        refused = invoke("plan", *wrong)
        assert refused.code == 2
        assert "plan needs two models and a device, by flags: flyspec plan --model" in refused.err


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    config = {**LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 40}
    (tmp_path / "config.json").write_text(json.dumps(config))
    models = ["--model", str(tmp_path), "--draft-model", str(bundled.DRAFT)]
    assert "does not fit: weights take" in invoke("plan", *models, "--device", "l4").out
