"""What `bench` and `eval` make of samples; the measuring itself is tested through the CLI."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from flyspec.bench.accuracy import (
    extract_answer,
    has_answers,
    log_likelihoods,
    to_samples,
)
from flyspec.bench.accuracy import report as report_texts
from flyspec.bench.conditions import (
    ALL_CONDITIONS,
    CONDITIONS,
    Condition,
    parse_conditions,
    parse_rules,
    with_plain,
)
from flyspec.bench.prompts import Group, fresh_problems, groups, to_request
from flyspec.bench.speed import ModeReport, Sample, report, to_document
from flyspec.bench.tables import accuracy_table, rules_table, speed_table
from flyspec.client import (
    Chat,
    Chunk,
    Completion,
    Generation,
    GenerationTimings,
    SpeculationMetrics,
    Started,
)
from flyspec.errors import ConfigError, InvalidArgumentError
from flyspec.prompts import Prompt
from flyspec.rules import Divergence, Rule, WindowScope
from flyspec.validation import RULE_PRESETS
from flyspec.values.generation import FinishReason
from flyspec.values.tokens import Origin


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
    plain, fly = report_texts(TWO_PROBLEMS, {"plain": PLAIN_TEXTS, "fly": FLY_TEXTS})
    shown = render(80, speed_table("g", reports["g"]), accuracy_table("problems", [plain, fly]))
    for text in ("2.00", "100.0%", "50.0%", "5.00%"):
        assert text in shown
    assert "…" not in shown
    shown = render(132, rules_table("problems", [plain, fly]))
    for text in ("4.30", "0.20", "1,000"):
        assert text in shown
    assert "…" not in shown


# --- texts of rules ---------------------------------------------------------------------------


def render(width: int, *tables: object) -> str:
    console = Console(file=io.StringIO(), width=width)
    for table in tables:
        console.print(table)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def generation(
    text: str, token_ids: list[int], loop: int | None = None, **speculation: object
) -> Generation:
    return Generation(
        Started("id", "target", "model", 3, [1, 2], Rule("fly", fly_window_size=6), 15),
        [Chunk(text, token_ids, [Origin.PLAIN] * len(token_ids))],
        Completion(
            finish_reason=FinishReason.STOP,
            stop_reason=None,
            prompt_tokens=2,
            completion_tokens=len(token_ids),
            speculation=SpeculationMetrics(**speculation),  # type: ignore[arg-type]
            timings=GenerationTimings(),
            loop_guard_token_index=loop,
        ),
    )


TWO_PROBLEMS = Group(
    "problems", [Prompt("Q", "gsm8k", "7", "row 1"), Prompt("R", "gsm8k", "8", "row 2")], True
)
TWO_PROMPTS = Group("code", [Prompt("def f", "humaneval"), Prompt("def g", "humaneval")])
PLAIN_TEXTS = [
    generation("#### 7", [5] * 10, num_rounds=10),
    generation("#### 8", [6] * 10, num_rounds=10),
]
FLY_TEXTS = [
    generation(
        "#### 7", [5] * 10, num_rounds=2, num_spec_steps=2, num_accepted_draft_tokens=8,
        num_rejected_tokens=2, rejected_cost_nats=9.0, num_rollbacks=1,
        distribution_bytes=3000, round_bytes=4000,
    ),
    generation(
        "#### 9", [7] * 10, loop=9, num_rounds=2, num_spec_steps=1, num_accepted_draft_tokens=8,
        num_loose_tokens=1, loose_cost_nats=0.2, num_rejected_tokens=1, rejected_cost_nats=3.9,
    ),
]  # fmt: skip


def test_a_report_tells_what_a_rule_won_and_lost() -> None:
    plain, fly = report_texts(TWO_PROBLEMS, {"plain": PLAIN_TEXTS, "fly": FLY_TEXTS})
    assert (plain.accuracy, plain.recovery, plain.same_as_plain) == (1.0, 1.0, 2)
    assert (plain.mean_loose_gap_nats, plain.mean_rejected_gap_nats) == (None, None)
    assert (fly.correct, fly.accuracy, fly.recovery) == (1, 0.5, 0.5)
    assert fly.log_likelihood_per_token is None
    assert fly.mean_accepted_tokens == 5.0
    assert fly.mean_acceptance_length == pytest.approx(1 + 16 / 3)
    assert (fly.loose_tokens, fly.loose_share) == (1, 0.05)
    assert fly.mean_loose_gap_nats == pytest.approx(0.2)
    assert fly.mean_rejected_gap_nats == pytest.approx(4.3)
    assert (fly.rejected_tokens, fly.rollbacks, fly.loops, fly.same_as_plain) == (3, 1, 1, 1)
    assert fly.distribution_bytes_per_round == 1000.0
    assert fly.round_bytes_per_round == 1000.0


def test_loops_are_counted_where_the_guard_is_off_as_well() -> None:
    texts = [generation("", [5] * 48), generation("", [5] * 10), generation("", [5], loop=1)]
    (plain,) = report_texts(TWO_PROMPTS, {"plain": texts})
    assert plain.loops == 2


def test_without_answers_the_target_is_asked() -> None:
    results = {"plain": PLAIN_TEXTS, "fly": FLY_TEXTS}
    scores = {"plain": [-1.0, -3.0], "fly": [-1.0, -5.0]}
    plain, fly = report_texts(TWO_PROMPTS, results, scores)
    assert (fly.correct, fly.accuracy, fly.recovery) == (None, None, None)
    assert plain.log_likelihood_per_token == pytest.approx(-0.2)
    assert fly.log_likelihood_per_token == pytest.approx(-0.3)
    assert "-0.3000" in render(132, rules_table("code", [plain, fly]))


async def test_equal_texts_are_scored_once() -> None:
    class Counting:
        calls = 0

        def log_likelihood(self, prompt: tuple[int, ...], output: tuple[int, ...]) -> float:
            self.calls += 1
            assert prompt == (1, 2)
            return -float(output[0])

    reference = Counting()
    scores = await log_likelihoods(reference, {"plain": PLAIN_TEXTS, "fly": FLY_TEXTS})  # type: ignore[arg-type]
    assert scores == {"plain": [-5.0, -6.0], "fly": [-5.0, -7.0]}
    assert reference.calls == 3


def test_samples_hold_everything_and_are_json() -> None:
    samples = json.loads(json.dumps(to_samples(TWO_PROBLEMS, {"fly": FLY_TEXTS})))
    assert [s["correct"] for s in samples] == [True, False]
    assert samples[1]["loop_guard_token_index"] == 9
    assert samples[1]["prompt"] == "row 2"
    assert samples[0]["rule"] == {"name": "fly", "fly_window_size": 6}
    assert samples[0]["speculation"]["num_rejected_tokens"] == 2
    assert samples[0]["origins"] == ["PLAIN"] * 10


def test_a_group_has_answers_or_has_none() -> None:
    assert has_answers(TWO_PROBLEMS)
    assert not has_answers(TWO_PROMPTS)
    with pytest.raises(ConfigError, match="line 2: no answer to compare with"):
        has_answers(Group("f", [Prompt("Q", "gsm8k", "7"), Prompt("R", "gsm8k", None, "line 2")]))


# --- how rules are named ----------------------------------------------------------------------


def test_rules_are_named_with_their_parameters() -> None:
    found = parse_conditions(
        "plain, fly,margin:margin_threshold=0.2,fly_window_size=4,num_speculative_tokens=4,"
        "fuzzy:divergence=kl,mine:window_scope=across_rounds"
    )
    assert found == (
        Condition("plain", Rule("exact"), 0),
        Condition("fly", Rule("fly")),
        Condition(
            "margin:margin_threshold=0.2,fly_window_size=4,num_speculative_tokens=4",
            Rule("margin", margin_threshold=0.2, fly_window_size=4),
            4,
        ),
        Condition("fuzzy:divergence=kl", Rule("fuzzy", divergence=Divergence.KL)),
        Condition(
            "mine:window_scope=across_rounds",
            Rule("mine", window_scope=WindowScope.ACROSS_ROUNDS),
        ),
    )


def test_all_is_every_preset_and_plain_decoding_comes_first() -> None:
    assert parse_conditions("all") == ALL_CONDITIONS
    assert {c.rule.name for c in ALL_CONDITIONS} == set(RULE_PRESETS)
    assert with_plain(parse_conditions("fly")) == (CONDITIONS[0], Condition("fly", Rule("fly")))
    assert with_plain(CONDITIONS) == CONDITIONS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no rule"),
        ("fly,fly", "names 'fly' twice"),
        ("fly,fly_window_size=4", "'fly_window_size=4' follows no rule"),
        ("margin:threshold=1", "parameters are num_speculative_tokens, fly_window_size"),
        ("margin:margin_threshold", "no parameter with a value"),
        ("margin:margin_threshold=x", "margin_threshold must be a number, got 'x'"),
        ("fly:fly_window_size=-1", "fly_window_size must be an integer, 0 or more, got '-1'"),
        ("fuzzy:divergence=hellinger", "divergence must be one of js, kl, tv, got 'hellinger'"),
        (":fly_window_size=1", "no rule's name"),
    ],
)
def test_rules_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_conditions(text)


def test_judged_rules_are_checked_and_have_no_k() -> None:
    assert parse_rules("fly,margin:margin_threshold=0.2")[1][1].margin_threshold == 0.2
    assert all(c.num_speculative_tokens is None or c.name not in dict(parse_rules("all"))
               for c in ALL_CONDITIONS)  # fmt: skip
    with pytest.raises(ConfigError, match="'plain' sets K"):
        parse_rules("plain,fly")
    with pytest.raises(InvalidArgumentError, match=r"rule\.margin_threshold"):
        parse_rules("margin:margin_threshold=-1")
