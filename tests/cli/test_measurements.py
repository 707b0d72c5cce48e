"""What `bench` and `eval` make of samples; the measuring itself is tested through the CLI."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from bench.accuracy import AccuracyReport, extract_answer
from bench.prompts import fresh_problems, groups, to_request
from bench.speed import ModeReport, Sample, report, to_document
from bench.tables import accuracy_table, speed_table
from flyspec.cli.prompts import Prompt
from flyspec.client import Chat


def sample(mode: str, prompt: int, seconds: float, repeat: int = 0, **more: object) -> Sample:
    ids = [1] * 10
    return Sample("g", prompt, repeat, mode, ids, seconds, **more)  # type: ignore[arg-type]


def modes(samples: list[Sample]) -> dict[str, ModeReport]:
    return {r.mode: r for r in report(samples)["g"]}


def test_ratios_are_taken_a_prompt_and_then_their_median() -> None:
    samples = []
    for prompt, (plain, fly) in enumerate([(1.0, 0.5), (2.0, 0.5), (4.0, 4.0)]):
        samples += [
            sample("plain", prompt, plain, rounds=10),
            sample("fly", prompt, fly, rounds=2, spec_steps=2, accepted=8, loose=1,
                   overhead_ns=1_500_000),
        ]  # fmt: skip
    fly = modes(samples)["fly"]
    assert fly.ratio_to_plain == 2.0  # of 2, 4, 1
    assert fly.total_ratio_to_plain == pytest.approx(7.0 / 5.0)
    assert fly.mean_accepted_tokens == 5.0
    assert fly.mean_acceptance_length == 5.0
    assert fly.loose_share == 0.1
    assert fly.round_overhead_p50_ms == 1.5
    assert (fly.same_as_plain, fly.prompts) == (3, 3)


def test_best_is_the_faster_baseline_of_each_prompt() -> None:
    samples = [
        sample("plain", 0, 1.0), sample("transformers", 0, 2.0), sample("fly", 0, 0.5),
        sample("plain", 1, 2.0), sample("transformers", 1, 1.0), sample("fly", 1, 0.5),
    ]  # fmt: skip
    reports = modes(samples)
    assert reports["fly"].ratio_to_best == 2.0
    assert reports["transformers"].ratio_to_plain == 1.25
    assert list(reports) == ["plain", "transformers", "fly"]


def test_a_repeat_that_was_held_up_does_not_count() -> None:
    samples = [sample("plain", 0, s, i) for i, s in enumerate([1.0, 1.0, 1.0])]
    samples += [sample("fly", 0, s, i) for i, s in enumerate([0.5, 60.0, 0.5])]
    assert modes(samples)["fly"].ratio_to_plain == 2.0
    assert modes(samples)["fly"].tokens_per_second == 20.0


@pytest.mark.parametrize(
    ("text", "strict", "answer"),
    [
        ("3 + 4 = 7.\n#### 7", True, "7"),
        ("3 + 4 = 7.\n#### 7\n", True, "7"),
        ("#### 7 apples", True, None),
        ("#### 7\nAnd more", True, None),
        ("it is 7", True, None),
        ("so #### $1,200 in all, or 3", False, "1200"),
        ("first 3, then 7.", False, "7"),
        ("none", False, None),
    ],
)
def test_answers(text: str, strict: bool, answer: str | None) -> None:
    assert extract_answer(text, strict) == answer


def test_fresh_problems_can_be_solved_and_repeat() -> None:
    group = fresh_problems(5, seed=1)
    assert group.strict
    assert group.prompts == fresh_problems(5, seed=1).prompts
    assert group.prompts != fresh_problems(5, seed=2).prompts
    assert all(p.reference and p.text for p in group.prompts)


def test_questions_are_asked_and_code_is_continued() -> None:
    question, code = Prompt("Q", "gsm8k"), Prompt("def f", "humaneval")
    assert isinstance(to_request(question, None), Chat)
    assert to_request(code, None) == "def f"
    assert to_request(question, False) == "Q"
    assert isinstance(to_request(code, True), Chat)


def test_problems_are_the_default_only_without_files(tmp_path: object) -> None:
    assert [g.name for g in groups([], None, 1, None)] == ["word problems"]
    assert len(groups([], None, 1, None)[0].prompts) == 20


def test_tables_and_documents() -> None:
    reports = report([sample("plain", 0, 1.0), sample("fly", 0, 0.5)])
    document = json.loads(json.dumps(to_document(reports, max_tokens=10)))
    assert document["max_tokens"] == 10
    assert document["groups"]["g"][1]["ratio_to_plain"] == 2.0
    console = Console(file=io.StringIO(), width=80)
    console.print(speed_table("g", reports["g"]))
    accuracy = AccuracyReport("fly", 4, 3, 0.75, 1.0, 9.5, 9.1, 0.02, 0.4, 1, 0)
    console.print(accuracy_table("word problems", [accuracy]))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("2.00", "75.0%", "9.50", "2.00%"):
        assert text in shown
    assert "…" not in shown
