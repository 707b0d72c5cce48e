"""`flyspec eval` on a stack of tiny models: all rules, runs that go on, failures."""

from __future__ import annotations

import asyncio
import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.client import AsyncClient
from flyspec.errors import ConfigError
from flyspec_lab.bench.conditions import ALL_CONDITIONS
from flyspec_lab.bench.reference import Reference
from flyspec_lab.run import log_likelihood
from tests.cli.processes import flyspec, invoke, start

pytestmark = pytest.mark.slow


def test_a_target_that_is_not_here_cannot_be_asked() -> None:
    with pytest.raises(ConfigError, match="needs the target's directory on this machine"):
        Reference("someone/model", "float32")


async def test_log_likelihood_is_the_sum_over_single_steps(stack: Stack, models: list[str]) -> None:
    prompt, output = [5, 6, 7], [8, 9, 10, 1]
    model = AutoModelForCausalLM.from_pretrained(models[1], dtype=torch.float64)
    expected = 0.0
    with torch.inference_mode():
        for i, token in enumerate(output):
            logits = model(torch.tensor([[*prompt, *output[:i]]])).logits[0, -1]
            expected += float(torch.log_softmax(logits, -1)[token])
    async with AsyncClient(stack.address) as client:
        assert await log_likelihood(client, prompt, output) == pytest.approx(expected, abs=1e-2)
        assert await log_likelihood(client, prompt, []) == 0.0


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "the cat"}\n{"prompt": "def total("}\n')
    return path


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    row = '{"question": "the cat sat %d", "answer": "#### 1"}\n'
    path.write_text("".join(row % i for i in range(4)))
    return path


def samples_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


async def written(process: asyncio.subprocess.Process, run: Path, count: int) -> None:
    """Wait until a process has written so many samples."""
    file = run / "samples.jsonl"
    async with asyncio.timeout(120):
        while not file.exists() or file.read_bytes().count(b"\n") < count:
            assert process.returncode is None, "it was too fast"
            await asyncio.sleep(0.002)


def test_all_rules_on_prompts_without_answers(stack: Stack, prompts: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = invoke(
        "eval", "--address", stack.address, "--prompt-file", str(prompts), "--rules", "all",
        "--max-tokens", "12", "--num-speculative-tokens", "5", "--output", str(run),
    )  # fmt: skip
    assert result.code == 0, result.err
    document = json.loads((run / "report.json").read_text())
    reports = {r["condition"]: r for r in document["conditions"]}
    assert list(reports) == [c.name for c in ALL_CONDITIONS]
    for name in ("exact", "rejection", "cactus"):  # greedy: both lose nothing
        assert reports[name]["same_as_plain"] == 2
        assert reports[name]["loose_tokens"] == 0
    for condition in ALL_CONDITIONS:
        r = reports[condition.name]
        assert r["accuracy"] is None
        assert -math.inf < r["log_likelihood_per_token"] < 0
        sends = condition.rule.name in ("fuzzy", "fuzzy-reference", "kl", "ensemble")
        assert (r["distribution_bytes_per_round"] > 0) == sends, condition.name
    samples = samples_of(run)
    assert len(samples) == 2 * len(ALL_CONDITIONS)
    by_rule = {s["condition"]: s for s in samples}
    margin = by_rule["margin, K = 4"]
    assert margin["num_speculative_tokens"] == 4
    assert json.loads(margin["rule"])["window_scope"] == "ACROSS_ROUNDS"
    loose = [s for s in samples if s["num_loose_tokens"]]
    assert loose
    for s in loose:
        assert s["origins"].count("LOOSE") == s["num_loose_tokens"] == len(s["loose_gaps_nats"])
        assert sum(s["loose_gaps_nats"]) == pytest.approx(s["loose_cost_nats"])


async def test_a_run_goes_on_where_it_was_interrupted(
    stack: Stack, questions: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments = [
        "eval", "--address", stack.address, "--prompt-file", str(questions), "--rules", "exact,fly",
        "--grid", "K=4,5", "--max-tokens", "40", "--concurrency", "1", "--output", str(run),
        "--resume",
    ]  # fmt: skip
    process = await start(*arguments)
    await written(process, run, 6)
    process.send_signal(signal.SIGINT)
    out, err = await process.communicate()
    assert process.returncode == 130, err
    assert b"exact, K = 4" in out
    assert b"interrupted; these are the results until then" in err
    count = len(samples_of(run))
    # It may grow, too: only what is missing or new is made, and reported with what there is.
    result = await flyspec(*arguments, "--json", "--rules", "exact,fly,margin")
    assert result.code == 0, result.err
    (document,) = result.documents
    conditions = 1 + 3 * 2
    assert document["samples"]["found"] == count > 0
    assert document["samples"]["made"] == 4 * conditions - count
    assert len(samples_of(run)) == 4 * conditions  # none twice
    assert {r["problems"] for r in document["conditions"]} == {4}
    # But not change.
    refused = await flyspec(*arguments, "--temperature", "0.5", "--max-tokens", "61")
    assert refused.code == 2
    assert "sampling.temperature: was 0.0, is 0.5" in refused.err
    assert "tasks.questions.max_tokens: was 40, is 61" in refused.err


async def test_another_target_does_not_go_on(
    stack: Stack, models: list[str], questions: Path, tmp_path: Path
) -> None:
    arguments = ["eval", "--prompt-file", str(questions), "--rules", "plain", "--max-tokens", "4",
                 "--output", str(tmp_path / "run"), "--resume"]  # fmt: skip
    first = await flyspec(*arguments, "--address", stack.address)
    assert first.code == 0, first.err
    async with Stack(StackOptions(model=models[3], draft_model="")) as other:
        refused = await flyspec(*arguments, "--address", other.address)
        assert refused.code == 2
        assert "models.target.weights_fingerprint: was" in refused.err


def test_failures_are_rows_and_are_tried_again(stack: Stack, tmp_path: Path) -> None:
    prompts, run = tmp_path / "prompts", tmp_path / "run"
    prompts.write_text("the cat\n" + "the dog " * 300 + "\n")
    arguments = [
        "eval", "--address", stack.address, "--prompt-file", str(prompts), "--rules", "exact",
        "--max-tokens", "4", "--output", str(run), "--resume",
    ]  # fmt: skip
    for attempt in (1, 2):
        result = invoke(*arguments)
        assert result.code == 1
        assert "2 texts failed and are left out; --resume makes them again" in result.out
        rows = samples_of(run)
        failed = [row for row in rows if row["error"] is not None]
        assert len(failed) == 2 * attempt
        assert "context" in failed[0]["error"]
        assert len(rows) - len(failed) == 2


async def test_a_server_that_is_gone_ends_the_run(models: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    prompts = tmp_path / "prompts"
    prompts.write_text("".join(f"the cat {i}\n" for i in range(500)))
    async with Stack(StackOptions(model=models[1], draft_model="")) as stack:
        process = await start(
            "eval", "--address", stack.address, "--prompt-file", str(prompts), "--rules", "plain",
            "--max-tokens", "4", "--output", str(run),
        )  # fmt: skip
        await written(process, run, 1)
    out, err = await process.communicate()
    assert process.returncode == 1, err
    assert b"ended early, since no server answers" in out, err
    assert b"texts are left; --resume makes them" in out


def test_tasks_and_seeds(stack: Stack, questions: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = [
        "eval", "--address", stack.address, "--task", "word_problems", "--problems", "2",
        "--prompt-file", str(questions), "--rules", "typical", "--controls", "--seeds", "2",
        "--temperature", "1", "--max-tokens", "16", "--num-speculative-tokens", "5",
        "--output", str(run), "--json", "--log-likelihood",
    ]  # fmt: skip
    result = invoke(*arguments)
    assert result.code == 0, result.err
    (document,) = result.documents
    tasks = {r["task"]: r for r in document["conditions"]}
    assert list(tasks) == ["word_problems", "questions"]
    assert (tasks["questions"]["problems"], tasks["questions"]["samples"]) == (4, 8)
    assert tasks["questions"]["log_likelihood_per_token"] < 0
    names = [r["condition"] for r in document["conditions"] if r["task"] == "questions"]
    assert names[:2] == ["plain", "typical"]
    assert all(name.startswith("random") for name in names[2:])
    rows = samples_of(run)
    seeds = {(r["prompt_id"], r["repeat"]): r["seed"] for r in rows if r["task"] == "questions"}
    assert len(set(seeds.values())) == len(seeds) == 8
    assert "<svg" in (run / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], "--resume needs the --output"),
        (["--output", "report.json"], "is a directory, which"),
        (["--task", "gsm9k=x"], "--task gsm9k: must be one of"),
        (["--task", "=x"], "--task '=x': must be NAME=PATH"),
        (["--grid", "W"], "must be PARAMETER=VALUE,VALUE, such as K=4,8,15"),
        (
            ["--address", "127.0.0.1:1", "--rival", "small"],
            "is started beside a stack",
        ),
        (["--address", "127.0.0.1:1", "--model", "x"], "--model: only with --local"),
    ],
)
def test_wrong_options_are_refused_at_once(arguments: list[str], message: str) -> None:
    result = invoke("eval", *arguments)
    assert result.code == 2
    assert message in result.err


def test_wrong_rules_are_refused_before_anything_is_made(stack: Stack) -> None:
    result = invoke("eval", "--address", stack.address, "--rules", "flyy")
    assert result.code == 2
    assert "has no rule 'flyy' (did you mean fly?)" in result.err
