"""docs/gpu.md says what the services' planner calculates, and only what was measured on a GPU."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.gpu.__main__ import gpu
from bench.gpu.example import (
    BANDWIDTH,
    DTYPE,
    GPU_BYTES,
    MAX_MODEL_LEN,
    RANKS,
    SHARES,
    Served,
    example_parts,
    served,
    tokens_per_round,
)
from bench.gpu.parts import NOTHING, measured_parts, read_reports
from bench.gpu.sizes import tables

from flyspec.cli.json_output import to_json
from flyspec.engine import cache_size
from flyspec.engine.cache_size import Fit, check_fits
from flyspec.engine.checkpoint import Checkpoint
from flyspec.engine.device_memory import OUTSIDE_TORCH, DeviceMemory
from flyspec.errors import ConfigError
from flyspec_lab.bench.device.report import DeviceReport, DraftTime, JudgingTime, StepTime
from tests.deployment.rendered import ROOT

DOCUMENT = ROOT / "docs" / "gpu.md"
MACHINE = {"accelerator": "H100", "driver": "580.1", "cores": 16,
           "versions": {"torch": "2.11", "transformers": "5.23"}}  # fmt: skip


def part(name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", DOCUMENT.read_text(), re.DOTALL)
    assert found, name
    return found[1].strip()


@pytest.mark.parametrize("name", ["memory", "sessions", "bounds"])
def test_the_example_is_what_the_planner_says(name: str) -> None:
    """Otherwise run `python -m bench.gpu`."""
    assert part(name) == example_parts()[name]


@pytest.mark.parametrize("index", [0, 1], ids=["target", "draft"])
def test_the_planner_is_the_one_that_services_ask(
    index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one: Served = served()[index]
    parameters = one.weight_bytes // DTYPE.itemsize
    header = json.dumps({"w": {"dtype": "BF16", "shape": [parameters], "data_offsets": [0, 0]}})
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    memory = DeviceMemory(GPU_BYTES, GPU_BYTES - OUTSIDE_TORCH, OUTSIDE_TORCH)
    monkeypatch.setattr(cache_size, "device_memory", lambda device: memory)
    told: list[Fit] = []
    monkeypatch.setattr(Fit, "tell", lambda fit, plan: told.append(fit))
    device = torch.device("cuda", 0)
    check_fits(one.settings, Checkpoint(
        one.shape, one.config, DTYPE, device, MAX_MODEL_LEN, one.ranks, weights
    ))  # fmt: skip
    assert told[0].taken == one.fit.taken
    assert (told[0].limit, told[0].left) == (one.fit.limit, one.fit.left)
    assert one.cache_tokens >= MAX_MODEL_LEN


def test_the_command_is_that_of_the_example() -> None:
    block = re.search(r"(flyspec serve.*?)\n```", DOCUMENT.read_text(), re.DOTALL)
    assert block
    words = shlex.split(block[1].replace("\\\n", " "))
    flags = dict(zip(words[2::2], words[3::2], strict=True))
    assert flags["--tensor-parallel-size"] == str(RANKS)
    assert flags["--max-model-len"] == str(MAX_MODEL_LEN)
    assert float(flags["--gpu-memory-utilization"]) == SHARES["target"]
    assert float(flags["--draft-gpu-memory-utilization"]) == SHARES["draft"]
    assert sum(SHARES.values()) < 0.95


def test_bounds_by_hand() -> None:
    """70.55 and 8.03 billion weights of two bytes; the cache adds a percent."""
    rows = [row.strip("| ").split(" | ") for row in example_parts()["bounds"].splitlines()]
    rates = {(row[0], row[1]): float(row[-1]) for row in rows[2:]}
    plain, drafted = 141.1e9 / 4 / BANDWIDTH, 16.06e9 / BANDWIDTH
    assert rates["none", "-"] == pytest.approx(1 / plain, rel=0.02)
    found = rates["llama-8b, K = 15", "0.9"]
    tokens = sum(0.9**i for i in range(16))
    assert tokens_per_round(0.9, 15) == pytest.approx(tokens)
    assert found == pytest.approx(tokens / (plain + 15 * drafted), rel=0.05)


def device_report(device: str = "cuda") -> dict[str, Any]:
    steps = [
        StepTime(mode, batch, tokens, 512, ratio, 2 * ratio, 3.0, 10**9, 10**6, 1.0, ratio)
        for mode, ratio in (("eager", 9.5), ("compiled", 1.25))
        for batch in (1, 8)
        for tokens in (1, 16)
    ]
    drafts = [DraftTime("compiled", 1, 15, 512, 8.0, 9.0, 8.5, 10, 1, 4.0, 2.0, 0.57, 1)]
    judging = [JudgingTime("fly", 1.0, 15, 32, 2.5, 2.75, 41, 1)]
    report = DeviceReport(
        device, "bfloat16", "llama-8b", "llama-1b", 8 * 10**9, "flex", 32, 128_256, 12, 3e12,
        4 << 30, MACHINE, {"captured": "RuntimeError: no"}, steps, drafts, judging,
    )  # fmt: skip
    document: dict[str, Any] = json.loads(to_json(vars(report)))
    return document


def test_what_was_measured_on_a_gpu_is_written(tmp_path: Path) -> None:
    (tmp_path / "llama-8b.json").write_text(to_json(device_report()))
    mode = {"acceptance_rate": 0.8, "tokens_per_second": 50.0, "speedup": 1.5, "worst_speedup": 0.9,
            "worst_prompt": 2, "verify_step_ms": 12.0, "draft_step_ms": 1.0, "bound_in_turn": 2.0,
            "judge_ms": 0.5, "mode": "exact"}  # fmt: skip
    pair = {"device": "cuda", "target": "random llama-8b", "num_speculative_tokens": 15,
            "modes": [mode], "machine": MACHINE}  # fmt: skip
    (tmp_path / "pair.json").write_text(to_json(pair))
    speed = {"mode": "fly", "tokens_per_second": 900.0, "mean_accepted_tokens": 6.0,
             "ratios": {"plain": {"median": 2.0, "worst": 1.1}}}  # fmt: skip
    (tmp_path / "speed.json").write_text(
        to_json({"device": "cuda:0", "groups": {"word problems": [speed]}, "machine": MACHINE})
    )
    document = tmp_path / "gpu.md"
    document.write_text(DOCUMENT.read_text())
    gpu(reports=tmp_path, document=document)
    text = document.read_text()
    assert NOTHING not in text
    assert "H100, driver 580.1; 16 cores; torch 2.11, transformers 5.23." in text
    assert "- steps of llama-8b, eager: 9.50 x bound (batch 1, 1 tokens, context 512)" in text
    assert "- llama-8b: captured: RuntimeError: no" in text
    assert "| llama-1b | captured, compiled | 1 | 15 | 512 |" in text
    assert "| fly | 1 | 32 | 2.50 | 2.75 | 41 | 1 |" in text
    assert "0.90 (#2)" in text
    assert "| word problems | fly | 900 | 2.00 | 1.10 | 6.00 |" in text
    assert (tmp_path / "images" / "gpu-steps.svg").stat().st_size > 1000
    assert "images/gpu-steps.svg" in text


def test_other_devices_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "device.json").write_text(to_json(device_report("cpu")))
    found = read_reports(tmp_path)
    assert found == {}
    assert {*measured_parts(found).values()} == {NOTHING}
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match=r"broken\.json: not JSON"):
        read_reports(tmp_path)


def test_packages_to_carry_are_of_the_versions_tested() -> None:
    def names(file: Path) -> set[str]:
        lines = file.read_text().splitlines()
        return {re.split("==", line)[0].lower().replace("_", "-") for line in lines
                if line and not line.startswith("#")}  # fmt: skip

    assert names(ROOT / "bench" / "gpu" / "wheels.txt") <= names(ROOT / "constraints.txt")


@pytest.mark.parametrize("name", ["targets", "drafts"])
def test_what_fits_is_what_the_planner_says(name: str) -> None:
    """Otherwise run `python -m bench.gpu.sizes`."""
    document = (ROOT / "docs" / "serve-your-own-models.md").read_text()
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", document, re.DOTALL)
    assert found
    assert found[1].strip() == tables()[name]
