"""`flyspec bench device` on a CPU, its models, and what it counts; nothing about times."""

from __future__ import annotations

import json
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from flyspec.cli.main import app
from flyspec.engine.memory import slot_bytes
from flyspec.errors import ConfigError
from flyspec_lab.bench.device.calls import count_calls, counted
from flyspec_lab.bench.device.measure import (
    BLOCK_SIZE,
    BenchModel,
    Measuring,
    copy_bandwidth,
    noted,
)
from flyspec_lab.bench.shapes import SHAPES, random_model, shape_named
from tests.tiny import make_model

CPU = torch.device("cpu")
SMALL = (
    "--device", "cpu", "--dtype", "float32", "--batch", "1,2", "--tokens", "1,4",
    "--context", "8,40", "--num-speculative-tokens", "3", "--mode", "eager,captured",
    "--repeats", "1",
)  # fmt: skip


@pytest.fixture(autouse=True)
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"IN_A_ROW": 1, "WARM_UP": 0, "_COPIED": {"cpu": 1 << 16}}.items():
        monkeypatch.setattr(f"flyspec_lab.bench.device.measure.{name}", value)


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["bench", "device", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def document_of(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    output = tmp_path / "device.json"
    result = run(*SMALL, *arguments, "--output", str(output))
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(output.read_text())
    document["shown"] = result.output
    return document


def test_every_kind_of_work_is_timed_in_every_mode(tmp_path: Path) -> None:
    found = document_of(tmp_path, "--shape", "tiny", "--draft-shape", "tiny")
    assert (found["target"], found["failures"]) == ("tiny", {})
    modes, batches, contexts = ("eager", "captured"), (1, 2), (8, 40)
    for times, tokens in ((found["steps"], (1, 4)), (found["drafts"], (3,))):
        cells = [(t["mode"], t["batch"], t["tokens"], t["context"]) for t in times]
        assert sorted(cells) == sorted(product(modes, batches, tokens, contexts))
    per_token = slot_bytes(SHAPES["tiny"].config(), 1, torch.float32)
    for times, reads in ((found["steps"], 1), (found["drafts"], 3)):
        for time in times:
            cached = time["batch"] * time["context"] * per_token
            assert time["read_bytes"] == reads * (cached + 4 * found["target_parameters"])
            assert time["bound_ms"] == pytest.approx(time["read_bytes"] / found["bandwidth"] * 1e3)
            assert time["ratio"] == pytest.approx(time["step_ms"] / time["bound_ms"])
            assert time["slowest_ms"] >= time["step_ms"] > 0


def test_a_model_with_files(tmp_path: Path) -> None:
    model = str(make_model(tmp_path / "model"))
    found = document_of(tmp_path, "--model", model, "--mode", "eager")
    assert found["target"] == "model"
    assert found["drafts"] == []


def test_what_fails_is_said_and_the_rest_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no such\nkernel")

    monkeypatch.setattr("flyspec.engine.runner.ModelRunner.accelerate", refuse)
    found = document_of(tmp_path, "--shape", "tiny", "--batch", "1", "--context", "8")
    assert found["failures"] == {"captured": "RuntimeError: no such kernel"}
    assert {s["mode"] for s in found["steps"]} == {"eager"}
    assert "not measured: captured: RuntimeError: no such kernel" in found["shown"]
    with noted(failures := {}, "one"):
        raise ValueError("x" * 400)
    assert len(failures["one"]) < 330


def test_out_of_time_it_reports_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part's time is divided among the modes, so that none is left without."""
    readings = count()
    monkeypatch.setattr(Measuring, "spent", property(lambda _: 0.05 * next(readings)))
    found = document_of(tmp_path, "--shape", "tiny", "--draft-shape", "tiny")
    modes = [step["mode"] for step in found["steps"]]
    assert 1 <= modes.count("captured") <= modes.count("eager") < 8
    assert [*found["failures"].values()].count("out of time") >= 2


def test_unknown_shapes_and_modes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--draft-shape 8b: must be one of llama-1b, llama-8b"):
        shape_named("--draft-shape", "8b")
    assert run(*SMALL, "--mode", "fast").exit_code == 2


def test_sequences_have_blocks_of_their_own() -> None:
    """Shared ones would be read from a GPU's cache, not from its memory."""
    loaded = random_model("tiny", SHAPES["tiny"].config(), CPU, torch.float32)
    model = BenchModel(loaded, 3)
    assert [slot for slot, _ in model.sequences(3, 3 * BLOCK_SIZE)] == [0, 1, 2]
    blocks = model.runner.cache.blocks[:3, :3]
    assert len({*blocks.flatten().tolist()} - {0}) == 9
    keys = model.runner.cache.kv_layers[1].rows[0]
    assert keys.std() > 0.9


def test_random_models_have_the_shape_and_sane_logits() -> None:
    loaded = random_model("tiny", SHAPES["tiny"].config(), CPU, torch.float32)
    assert (loaded.info.context_length, loaded.info.dtype) == (512, "float32")
    with torch.inference_mode():
        logits = loaded.model(torch.arange(30)[None]).logits
    assert 2 < logits.std() < 8
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        eight = AutoModelForCausalLM.from_config(SHAPES["llama-8b"].config())
    # https://huggingface.co/meta-llama/Llama-3.1-8B tells 8.03 billion.
    assert eight.num_parameters() == 8_030_261_248


def test_calls_are_counted_by_kind() -> None:
    found = counted([
        "cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx", "cudaGraphLaunch",
        "cudaMemcpyAsync", "cudaStreamSynchronize", "cudaEventSynchronize", "custom_op",
    ])  # fmt: skip
    assert found[:4] == (3, 1, 1, 1)
    assert "custom_op" not in found.names
    assert "cudaMemcpyAsync" in found.names


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what CUDA was asked for")
def test_without_cuda_nothing_is_counted() -> None:
    assert count_calls(lambda: torch.ones(3).sum()) == (0, 0, 0, 0, {})


def test_a_copy_moves_bytes() -> None:
    assert copy_bandwidth(CPU, 1 << 20, 2) > 0
