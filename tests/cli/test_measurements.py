"""How `bench` and `eval` evaluate samples; measuring itself is tested through the CLI."""

from __future__ import annotations

import json
import math

import pytest
from flyspec.bench.accuracy import (
    extract_answer,
    has_answers,
    log_likelihoods,
    to_samples,
)
from flyspec.bench.accuracy import report as report_texts
from flyspec.bench.versus import mcnemar_p

from flyspec.bench.conditions import (
    ALL_CONDITIONS,
    CONDITIONS,
    Condition,
    by_k,
    parse_conditions,
    parse_ks,
    parse_rules,
    with_plain,
)
from flyspec.bench.prompts import Group, fresh_problems
from flyspec.cli.json_output import to_json
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
from flyspec.rules.presets import RULE_PRESETS
from flyspec.values.generation import FinishReason
from flyspec.values.tokens import Origin


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
    assert isinstance(question.to_request(), Chat)
    assert code.to_request() == "def f"
    assert question.to_request(False) == "Q"
    assert isinstance(code.to_request(True), Chat)


# --- texts of rules ---------------------------------------------------------------------------


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
    assert fly.loose_cost_nats == pytest.approx(0.2)  # all of it, as everywhere
    assert fly.mean_rejected_gap_nats == pytest.approx(4.3)
    assert (fly.rejected_tokens, fly.rollbacks, fly.loops, fly.same_as_plain) == (3, 1, 1, 1)
    assert fly.distribution_bytes_per_round == 1000.0
    assert fly.round_bytes_per_round == 1000.0


def test_a_condition_is_compared_with_the_first_that_was_named() -> None:
    results = {"plain": PLAIN_TEXTS, "fly": FLY_TEXTS}
    plain, fly = report_texts(TWO_PROBLEMS, results)
    assert plain.versus is None
    assert fly.versus is not None
    assert (fly.versus.of, fly.versus.won, fly.versus.lost) == ("plain", 0, 1)
    assert fly.versus.mcnemar_p == 1.0  # one problem tells nothing
    assert fly.versus.loose_share_difference == pytest.approx(0.05)
    assert (fly.versus.low, fly.versus.high) == (0.0, pytest.approx(0.1))
    plain, fly = report_texts(TWO_PROBLEMS, results, first="fly")
    assert fly.versus is None
    assert plain.versus is not None
    assert (plain.versus.won, plain.versus.lost) == (1, 0)
    texts = report_texts(TWO_PROMPTS, results)[1].versus
    assert texts is not None
    assert (texts.won, texts.lost, texts.mcnemar_p) == (None, None, None)


@pytest.mark.parametrize(("won", "lost"), [(0, 0), (0, 1), (3, 3), (5, 1), (1, 9), (20, 41)])
def test_mcnemar_is_a_fair_coin_tossed(won: int, lost: int) -> None:
    n = won + lost
    of_each = {i: math.comb(n, i) / 2**n for i in range(n + 1)}
    extreme = [p for i, p in of_each.items() if abs(2 * i - n) >= abs(won - lost)]
    assert mcnemar_p(won, lost) == pytest.approx(sum(extreme))


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
    samples = json.loads(to_json(to_samples(TWO_PROBLEMS, {"fly": FLY_TEXTS})))
    assert [s["correct"] for s in samples] == [True, False]
    assert samples[1]["loop_guard_token_index"] == 9
    assert samples[1]["prompt"] == "row 2"
    assert samples[0]["rule"] == {"name": "fly", "fly_window_size": 6}
    assert samples[0]["speculation"]["num_rejected_tokens"] == 2
    assert samples[0]["origins"] == ["PLAIN"] * 10


def test_a_group_has_answers_or_has_none() -> None:
    assert has_answers(TWO_PROBLEMS)
    assert not has_answers(TWO_PROMPTS)
    with pytest.raises(ConfigError, match="line 2: has no answer"):
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
        ("fly,fly_window_size=4", "no rule name before a colon"),
        ("margin:threshold=1", "parameters are num_speculative_tokens, fly_window_size"),
        ("margin:margin_threshold", "must be PARAMETER=VALUE"),
        ("margin:margin_threshold=x", "margin_threshold must be a number, got 'x'"),
        ("fly:fly_window_size=-1", "fly_window_size must be an integer, 0 or more, got '-1'"),
        ("fuzzy:divergence=hellinger", "divergence must be one of js, kl, tv, got 'hellinger'"),
        (":fly_window_size=1", "no rule name"),
    ],
)
def test_rules_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_conditions(text)


def test_ks_are_numbers_or_the_server_s_choice() -> None:
    assert parse_ks("auto") == ("auto",)
    assert parse_ks("auto, 0,15") == ("auto", 0, 15)
    for text in ("", "x", "-1", "4,4", "1.5"):
        with pytest.raises(ValueError, match=r"must be an integer|names no K"):
            parse_ks(text)
    rules = parse_conditions(
        "fly,margin:num_speculative_tokens=auto,exact:num_speculative_tokens=2"
    )
    names = [(c.name, c.requested_k(7)) for c in by_k(rules, ("auto", 0, 4))]
    assert names == [
        ("fly, K auto", "auto"), ("fly, K 4", 4), (rules[1].name, "auto"), (rules[2].name, 2),
    ]  # fmt: skip
    assert [(c.name, c.requested_k("auto")) for c in by_k(rules[:1], (9,))] == [("fly", 9)]
    assert rules[0].requested_k(7) == 7


def test_judged_rules_are_checked_and_have_no_k() -> None:
    assert parse_rules("fly,margin:margin_threshold=0.2")[1][1].margin_threshold == 0.2
    assert all(c.num_speculative_tokens is None or c.name not in dict(parse_rules("all"))
               for c in ALL_CONDITIONS)  # fmt: skip
    with pytest.raises(ConfigError, match="'plain' sets K"):
        parse_rules("plain,fly")
    with pytest.raises(InvalidArgumentError, match=r"rule\.margin_threshold"):
        parse_rules("margin:margin_threshold=-1")
