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
from flyspec_lab.bench.device.calls import count_calls, counted_within
from flyspec_lab.bench.device.measure import BenchModel, noted
from flyspec_lab.bench.device.timing import Allowance, copy_bandwidth
from flyspec_lab.bench.shapes import SHAPES, random_model, shape_named
from tests.tiny import make_model

CPU = torch.device("cpu")
SMALL = (
    "--device", "cpu", "--dtype", "float32", "--batch", "1,3", "--tokens", "1,4",
    "--context", "8,40", "--num-speculative-tokens", "3", "--vocab-size", "600",
    "--block-size", "16", "--mode", "eager,captured", "--repeats", "1",
)  # fmt: skip


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
    assert (found["kind"], found["target"], found["failures"]) == ("device", "tiny", {})
    modes, batches, contexts = ("eager", "captured"), (1, 3), (8, 40)
    steps = [(s["mode"], s["batch"], s["tokens"], s["context"]) for s in found["steps"]]
    assert sorted(steps) == sorted(product(modes, batches, (1, 4), contexts))
    drafts = [(d["mode"], d["batch"], d["context"]) for d in found["drafts"]]
    assert sorted(drafts) == sorted(product(modes, batches, contexts))
    judged = [(j["rule"], j["temperature"], j["rounds"]) for j in found["judging"]]
    assert sorted(judged) == sorted(product(("exact", "fly", "typical"), (0.0, 1.0), batches))
    per_token = slot_bytes(SHAPES["tiny"].config(), 1, torch.float32)
    for cost in (*found["steps"], *found["drafts"]):
        assert cost["cache_bytes"] == cost["batch"] * cost["context"] * per_token
        assert cost["weight_bytes"] == 4 * found["target_parameters"]
        steps_in = 3 if "token_ms" in cost else 1
        read = steps_in * (cost["cache_bytes"] + cost["weight_bytes"])
        assert cost["bound_ms"] == pytest.approx(read / found["bandwidth"] * 1e3)
        assert cost["ratio"] == pytest.approx(cost["step_ms"] / cost["bound_ms"])
        assert cost["slowest_ms"] >= cost["step_ms"] > 0


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
    found = document_of(tmp_path, "--shape", "tiny")
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
    monkeypatch.setattr(Allowance, "spent", property(lambda _: 0.05 * next(readings)))
    found = document_of(tmp_path, "--shape", "tiny", "--draft-shape", "tiny")
    modes = [step["mode"] for step in found["steps"]]
    assert 1 <= modes.count("captured") <= modes.count("eager") < 8
    assert [*found["failures"].values()].count("out of time") >= 2
    assert len(found["judging"]) == 12


def test_unknown_shapes_and_modes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--draft-shape 8b: must be one of llama-1b, llama-8b"):
        shape_named("--draft-shape", "8b")
    assert run(*SMALL, "--mode", "fast").exit_code == 2


def test_sequences_have_blocks_of_their_own() -> None:
    """Shared ones would be read from a GPU's cache, not from its memory."""
    loaded = random_model("tiny", SHAPES["tiny"].config(), CPU, torch.float32)
    model = BenchModel(loaded, 3, 16, "auto")
    model.keep(3, 40)
    blocks = model.runner.cache.blocks[:3, :3]
    assert len({*blocks.flatten().tolist()} - {0}) == 9
    keys = model.runner.cache.kv_layers[1].rows[0]
    assert keys.std() > 0.9
    assert model.read_bytes(3, 40) == 120 * model.runner.bytes_per_token


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


def test_calls_are_counted_within_the_work() -> None:
    calls = [
        ("cudaLaunchKernel", 1.0), ("cudaLaunchKernelExC", 2.0), ("cuLaunchKernelEx", 2.5),
        ("cudaGraphLaunch", 3.0), ("cudaMemcpyAsync", 4.0), ("cudaStreamSynchronize", 5.0),
        ("cudaEventSynchronize", 5.5), ("cudaEventQuery", 6.0), ("custom_op", 6.0),
        ("cudaDeviceSynchronize", 9.0),
    ]  # fmt: skip
    found = counted_within((1.0, 8.0), calls)
    assert found[:5] == (3, 1, 1, 1, 1)
    assert found.launches == 4
    assert "custom_op" not in found.names
    assert "cudaDeviceSynchronize" not in found.names


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what CUDA was asked for")
def test_without_cuda_nothing_is_counted() -> None:
    assert count_calls(lambda: torch.ones(3).sum()) == (0, 0, 0, 0, 0, {})


def test_a_copy_moves_bytes() -> None:
    assert copy_bandwidth(CPU, 1 << 20, 2) > 0
