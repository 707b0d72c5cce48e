"""`flyspec bench engine`, `throughput`, `prefill-stall` on tiny models; nothing about times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from flyspec.cli.main import app
from flyspec.engine.loading import load_model
from flyspec.engine.model import Step
from flyspec.engine.runner import ModelRunner
from flyspec.errors import ConfigError
from flyspec_lab.bench.engine.parts import PARTS, timed_parts
from flyspec_lab.bench.engine.plots import plot_engine, plot_throughput
from flyspec_lab.bench.engine.stall_report import Arrival, StepRecord, report_chunk
from flyspec_lab.bench.engine.steps_report import EngineMemory, EngineReport, EngineRun, StepCost
from flyspec_lab.bench.engine.throughput import LevelSample, report
from flyspec_lab.bench.modes import Sample
from flyspec_lab.bench.options import EngineOptions, StallOptions, numbers
from tests.tiny import make_model

MS = 1_000_000


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("target"), seed=3))


@pytest.fixture(autouse=True)
def _few_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["bench", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def one_line(result: Any) -> str:
    """The output, which is wrapped in a box."""
    return " ".join(result.output.replace("│", " ").split())


ENGINE = ("engine", "--device", "cpu", "--batch", "1,3", "--k", "0,2", "--context", "8,40",
          "--chunk", "16,20,64", "--repeats", "1")  # fmt: skip


def test_engine_times_every_kind_of_step(target: str, tmp_path: Path) -> None:
    output, plot = tmp_path / "engine.json", tmp_path / "engine.svg"
    result = run(*ENGINE, "--model", target, "--dtype", "float32", "--threads", "1", "--json",
                 "--output", str(output), "--plot", str(plot))  # fmt: skip
    document = json.loads(result.stdout)
    assert document == json.loads(output.read_text())
    assert (document["dtype"], document["repeats"]) == ("float32", 1)
    (measured,) = document["runs"]
    kinds = [(s["batch"], s["num_speculative_tokens"], s["context"]) for s in measured["steps"]]
    assert sorted(kinds) == [(b, k, c) for b in (1, 3) for k in (0, 2) for c in (8, 40)]
    for step in measured["steps"]:
        for part in ("step_ms", "attention_ms", "cache_write_ms", "matrix_products_ms"):
            assert step[part] > 0, step
    # A chunk longer than the longest context cannot be cut from it.
    assert [p["chunk"] for p in measured["prefill"]] == [16, 20]
    memory = measured["memory"]
    # Two layers of keys and values, two KV heads of 12, float32; contexts of 40 and K + 1 tokens.
    assert memory["bytes_per_token"] == 2 * 2 * 2 * 12 * 4
    assert memory["slot_tokens"] == 43
    assert memory["cache_bytes"] == 3 * 43 * memory["bytes_per_token"]
    assert memory["weights"] == memory["total_weights"] > 0
    drawn = plot.read_text()
    assert "<text" in drawn
    assert "matrix products" in drawn
    assert plot.stat().st_size < 60_000


def test_engine_refuses_before_it_measures(target: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--context 254: with K = 2 .* 257 tokens, .* 256"):
        run("engine", "--model", target, "--context", "254", "--k", "2")
    refused = run("engine", "--model", target, "--batch", "0,2")
    assert refused.exit_code == 2
    assert "--batch '0,2': must be a comma-separated list" in one_line(refused)
    with pytest.raises(ConfigError, match="must end in"):
        run("engine", "--model", target, "--plot", str(tmp_path / "plot.txt"))
    with pytest.raises(ConfigError, match="no such directory"):
        run("engine", "--model", target, "--output", str(tmp_path / "none" / "x.json"))


def test_numbers_are_sorted_and_unique() -> None:
    assert numbers(0)("4, 0,4,") == (0, 4)
    for text in ("", "a", "1.5", "-1"):
        with pytest.raises(ValueError, match="integers of at least 0"):
            numbers(0)(text)


def test_the_parts_of_a_step_are_told_apart_and_leave_no_trace(target: str) -> None:
    runner = ModelRunner(load_model(target, "cpu", "float64"), 2)
    linear = torch.nn.functional.linear
    steps = [Step(0, 0, [5, 6, 7], 3), Step(1, 0, [8, 9], 1)]
    expected = runner.forward(steps)
    with timed_parts(runner.synchronize) as parts:
        assert torch.nn.functional.linear is not linear
        got = runner.forward(steps)
    assert torch.nn.functional.linear is linear
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(expected, got, strict=True))
    assert min(parts[name] for name in PARTS) > 0


def engine_run(size: int) -> EngineRun:
    steps = [
        StepCost(b, k, c, 2.0, 2.5, 500.0 * b, attention, 0.1, 1.0, 0.3)
        for b in (1, 2, 4)
        for k in (0, 8)
        for c, attention in ((128, 0.5), (512, 1.0), (2048, 2.0))
    ]
    return EngineRun(size, 2, steps, [], EngineMemory(1024, 2**21, 2048, 4, 2**23, 2**20, 2**20))


def test_runs_of_several_sizes_are_one_report(tmp_path: Path) -> None:
    whole = EngineReport("m", "float32", "cpu", 3, [engine_run(size) for size in (1, 2)])
    (tmp_path / "plot.svg").write_text(plot_engine(whole).svg)
    assert "2 ranks" in (tmp_path / "plot.svg").read_text()


def test_options_know_the_longest_sequence() -> None:
    options = EngineOptions("m", contexts=(64, 100), num_speculative_tokens=(0, 7))
    assert options.slot_tokens == 108
    assert options.prompt_chunks == []


# --- throughput -------------------------------------------------------------------------------


def sample(n: int, repeat: int, at_once: bool, seconds: float) -> LevelSample:
    one = Sample("g", 0, repeat, "exact", 0.405, 100, rounds=25, first_token_s=0.009,
                 target_ns=int(seconds * 5e8))  # fmt: skip
    return LevelSample(n, repeat, at_once, seconds, [one] * n)


def test_gains_are_taken_a_pair(tmp_path: Path) -> None:
    samples = [sample(4, repeat, True, seconds) for repeat, seconds in enumerate((1.0, 2.0, 9.0))]
    samples += [sample(4, repeat, False, seconds) for repeat, seconds in enumerate((3.0, 8.0, 9.0))]
    samples += [sample(1, 0, True, 1.0), sample(1, 0, False, 1.0)]
    one, four = report(samples)
    assert (one.concurrency, one.speedup) == (1, 1.0)
    assert (four.speedup, four.lowest_speedup) == (3.0, 1.0)  # of 3, 4, 1
    assert four.tokens_per_second == 200.0
    assert four.sequential_tokens_per_second == 50.0
    assert four.mean_target_batch == pytest.approx(2.0)
    assert four.mean_accepted_tokens == 4.0
    assert four.time_per_output_token_p50_ms == pytest.approx(4.0)
    assert four.time_to_first_token_p50_ms == 9.0
    (tmp_path / "plot.svg").write_text(plot_throughput([one, four]).svg)
    assert "sequential" in (tmp_path / "plot.svg").read_text()


def test_throughput_runs_a_stack(target: str, tmp_path: Path) -> None:
    output = tmp_path / "throughput.json"
    result = run("throughput", "--model", target, "--draft-model", "", "--device", "cpu",
                 "--concurrency", "2", "--max-tokens", "4", "--ignore-eos", "--repeats", "1",
                 "--num-speculative-tokens", "2", "--json", "--output", str(output))  # fmt: skip
    document = json.loads(result.stdout)
    (level,) = document["levels"]
    assert level["concurrency"] == 2
    assert level["prefix_hit_rate"] == 0.0
    samples = json.loads(output.read_text())["samples"]
    assert [[g["tokens"] for g in s["generations"]] for s in samples] == [[4, 4], [4, 4]]
    assert {s["at_once"] for s in samples} == {True, False}


@pytest.mark.parametrize("command", ["throughput", "round"])
def test_one_rule_is_measured(command: str) -> None:
    for rule, message in (
        ("exact,fly", "names 2 rules"),
        ("fly:num_speculative_tokens=3", "use --num-speculative-tokens"),
    ):
        refused = run(command, "--rule", rule)
        assert refused.exit_code == 2
        assert message in one_line(refused)


# --- prefill-stall ----------------------------------------------------------------------------


def test_phases_are_told_apart() -> None:
    records = [StepRecord(at * MS, (at + length) * MS, 2, 6) for at, length in
               ((0, 10), (10, 10), (20, 30), (50, 20), (70, 10))]  # fmt: skip
    arrival = Arrival(records, [(9 * MS, 8.0), (45 * MS, 20.0), (79 * MS, 5.0)],
                      arrived_ns=20 * MS, answered_ns=70 * MS, chunk_ms=25.0)  # fmt: skip
    found = report_chunk(64, [arrival], StallOptions(prompt_tokens=200))
    assert found.cut
    assert {phase: of.count for phase, of in found.steps.items()} == {
        "before": 2, "during": 2, "after": 1,
    }  # fmt: skip
    assert {phase: of.max_ms for phase, of in found.rounds.items()} == {
        "before": 8.0, "during": 20.0, "after": 5.0,
    }  # fmt: skip
    assert found.added_p99_ms == 20.0
    assert found.bounded
    assert found.prompt_ms == 50.0
    assert [s.begin_ms for s in found.timeline] == [-20.0, -10.0, 0.0, 30.0, 50.0]
    assert StallOptions(chunks=(512, 4000)).all_chunks == [512, 1500]


def test_stall_lets_a_prompt_arrive(target: str, tmp_path: Path) -> None:
    plot = tmp_path / "stall.svg"
    tiny = ["prefill-stall", "--model", target, "--device", "cpu", "--sessions", "3",
            "--context", "8", "--num-speculative-tokens", "2", "--prompt-tokens", "100",
            "--prefill-chunk", "32", "--steps", "4", "--repeats", "1"]  # fmt: skip
    document = json.loads(run(*tiny, "--json", "--plot", str(plot)).stdout)
    cut, whole = document["chunks"]
    assert [(c["chunk"], c["cut"]) for c in (cut, whole)] == [(32, True), (100, False)]
    for chunk in (cut, whole):
        assert min(of["count"] for of in chunk["steps"].values()) > 0
        assert chunk["chunk_ms"] > 0
        assert isinstance(chunk["bounded"], bool)
    # Three chunks of 32 and one of 4, each with the rounds of three sessions or some of them.
    assert sum(step["tokens"] >= 32 for step in cut["timeline"]) == 3
    assert sum(step["tokens"] >= 100 for step in whole["timeline"]) == 1
    assert "one chunk" in plot.read_text()
    assert plot.stat().st_size < 60_000


def test_stall_refuses_what_the_model_does_not_reach(target: str) -> None:
    with pytest.raises(
        ConfigError, match=r"--prompt-tokens 1500, .* 1510 tokens, the model's limit is 256"
    ):
        run("prefill-stall", "--model", target, "--device", "cpu")
