"""The command as a user gives it: it trains a judge, which a stack then serves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flyspec.bundled import AUTOJUDGE, TARGET
from flyspec.cli.main import app
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.client import AsyncClient, GenerateOptions
from flyspec.engine.autojudge import read_judge
from flyspec.engine.loading import load_model
from flyspec.errors import ConfigError
from flyspec.rules import Rule
from flyspec.values.chat import Chat
from flyspec.values.tokens import Origin
from flyspec_lab.training.judge import train
from flyspec_lab.training.options import JudgeTrainOptions
from flyspec_lab.word_problems import problems

PROBLEMS = 64
"""Few, of which some important mismatches are held out."""


@pytest.mark.timeout(600)
@pytest.mark.slow
async def test_a_judge_is_trained_and_served(tmp_path: Path) -> None:
    file, report = tmp_path / "judge.safetensors", tmp_path / "report.json"
    result = CliRunner().invoke(
        app,
        ["autojudge", "train", "--problems", str(PROBLEMS), "--threads", "1", "--json",
         "--autojudge-file", str(file), "--output", str(report)],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    judge = read_judge(file)
    facts = judge.facts
    assert document["fingerprint"] == judge.fingerprint
    assert document["auc"] == facts.auc
    assert facts.prompts + document["unanswered"] <= PROBLEMS
    assert 0 < facts.important < facts.labels
    assert facts.seed == 1
    mismatches = json.loads(report.read_text())["mismatches"]
    assert len(mismatches) == facts.labels
    assert sum(each["important"] for each in mismatches) == facts.important

    options = StackOptions(autojudge_file=str(file), threads=1, draft_threads=1)
    async with Stack(options) as stack, AsyncClient(stack.address) as client:
        assert "autojudge" in (await client.list_models()).rules
        question = Chat.of_user(problems(7, 1)[0].question)

        async def ask(rule: Rule) -> tuple[list[int], int, float | None]:
            how = GenerateOptions(rule=rule, max_tokens=120, num_speculative_tokens=15)
            text = await client.complete(question, how)
            loose = sum(origin is Origin.LOOSE for origin in text.origins)
            return [*text.token_ids], loose, text.started.rule.judge_threshold

        exact, _, _ = await ask(Rule("exact"))
        _, _, own = await ask(Rule("autojudge"))
        assert own == pytest.approx(facts.threshold)
        never, none, _ = await ask(Rule("autojudge", judge_threshold=0.0))
        _, many, _ = await ask(Rule("autojudge", judge_threshold=1.0))
        assert (never, none) == (exact, 0)
        assert many > 0


def test_the_bundled_judge_is_the_bundled_targets() -> None:
    judge = read_judge(AUTOJUDGE)
    assert judge.misfit(load_model(str(TARGET), "cpu", "float32").info) == ""
    assert AUTOJUDGE.stat().st_size < 20_000
    assert judge.facts.auc > 0.9
    assert StackOptions().resolved().autojudge_file == str(AUTOJUDGE)
    assert StackOptions(model="other").resolved().autojudge_file is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (JudgeTrainOptions(recall=0.0), "--recall must be above 0 and at most 1, got 0"),
        (JudgeTrainOptions(recall=float("nan")), "--recall must be above 0"),
        (JudgeTrainOptions(model="x"), "--draft-model: give one"),
        (
            JudgeTrainOptions(autojudge_file=Path("/nowhere/j.safetensors")),
            "no such directory: /nowhere",
        ),
    ],
)
def test_options_that_cannot_work(options: JudgeTrainOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(options)


def test_tasks_that_cannot_be_learnt_from(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--task riddles: must be one of word_problems"):
        train(JudgeTrainOptions(task=(("riddles", None),)))
    (prompts := tmp_path / "prompts.txt").write_text("Once upon a time\n")
    with pytest.raises(ConfigError, match="its texts have no answers"):
        train(JudgeTrainOptions(task=(("open_ended", str(prompts)),)))
