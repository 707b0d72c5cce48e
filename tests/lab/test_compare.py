"""Reports of samples whose figures are known by counting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flyspec.errors import ConfigError
from flyspec.rules.presets import RULE_PRESETS
from flyspec.values.admin import ModelInfo
from flyspec_lab import compare
from flyspec_lab.answered import Answered
from flyspec_lab.arms import Arm, make_arms
from flyspec_lab.bench.conditions import parse_conditions
from flyspec_lab.compare import ConditionReport
from flyspec_lab.options import EvalOptions
from flyspec_lab.problems import TaskProblems
from flyspec_lab.run import Unit, Wanted, wanted_samples
from flyspec_lab.samples import KEY, TaskSample
from flyspec_lab.statistics import mcnemar_p, upper_bound
from flyspec_lab.tasks import Problem
from flyspec_lab.tasks.word_problems import WordProblems

TARGET = ModelInfo("target", "", 100, 100, weights_fingerprint="w")
TOKENS = 10


def made(
    rules: str, count: int, seeds: int = 1, rows: dict[str, list[dict[str, Any]]] | None = None
) -> tuple[list[Arm], Wanted, list[dict[str, Any]]]:
    """Return arms, the samples wanted, and rows: those given by condition, with defaults."""
    arms = make_arms(parse_conditions(rules), (), 15, "model", [*RULE_PRESETS])
    wanted = wanted_samples(EvalOptions(seeds=seeds), [words("task", count)], arms, TARGET, None)
    given = {name: iter(of) for name, of in (rows or {}).items()}

    def own(unit: Unit) -> dict[str, Any]:
        return next(given[unit.arm.name]) if unit.arm.name in given else {}

    return arms, wanted, rows_of(wanted, own)


def words(name: str, count: int) -> TaskProblems:
    return TaskProblems(
        name, WordProblems(), [Problem(f"problem {i}", "Q", "7") for i in range(count)]
    )


def rows_of(wanted: Wanted, own: Callable[[Unit], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each sample: what is its own, or else defaults."""
    return [
        {**BLANK, **DEFAULTS, **dict(zip(KEY, key, strict=True)), **own(unit)}
        for key, unit in wanted.items()
    ]


BLANK = TaskSample("", "", "", None, "", 0, "", "", 0, "", "", "").row()
DEFAULTS: dict[str, Any] = {
    "token_ids": [5] * TOKENS, "finish_reason": "STOP", "score": 1.0, "num_tokens": TOKENS,
    "num_rounds": TOKENS, "total_ns": 1_000_000_000,
}  # fmt: skip
FLY = [
    {"num_rounds": 2, "num_spec_steps": 2, "num_accepted_draft_tokens": 8, "total_ns": 500_000_000,
     "num_rejected_tokens": 2, "rejected_cost_nats": 9.0, "num_rollbacks": 1,
     "distribution_bytes": 3000, "round_bytes": 4000, "draft_model_ns": 200_000_000,
     "target_model_ns": 100_000_000, "judge_ns": 8_000_000},
    {"num_rounds": 2, "num_spec_steps": 1, "num_accepted_draft_tokens": 8, "total_ns": 500_000_000,
     "num_loose_tokens": 1, "loose_cost_nats": 0.2, "loose_gaps_nats": [0.2], "score": 0.0,
     "num_rejected_tokens": 1, "rejected_cost_nats": 3.9, "loop_guard_token_index": 9,
     "token_ids": [7] * TOKENS, "finish_reason": "LENGTH"},
]  # fmt: skip


def reports(
    rules: str, count: int, seeds: int = 1, **rows: list[dict[str, Any]]
) -> list[ConditionReport]:
    arms, wanted, found = made(rules, count, seeds, rows)
    return compare.report(Answered("task", arms, wanted, found))


def test_a_report_tells_what_a_rule_won_and_lost():
    plain, fly = reports("fly", 2, fly=FLY)
    assert (plain.accuracy.value, plain.same_as_plain) == (1.0, 2)
    assert (plain.mean_loose_gap_nats, plain.mean_rejected_gap_nats) == (None, None)
    assert (fly.accuracy.value, fly.recovery.value) == (0.5, 0.5)
    assert fly.log_likelihood_per_token is None
    assert fly.mean_accepted_tokens == 5.0
    assert fly.mean_accepted_tokens_interval.value == 5.0
    assert (fly.loose_tokens, fly.loose_share) == (1, 0.05)
    assert fly.mean_loose_gap_nats == pytest.approx(0.2)
    assert (fly.loose_gap_nats_90, plain.loose_gap_nats_90) == (0.2, None)
    assert fly.mean_rejected_gap_nats == pytest.approx(4.3)
    assert (fly.rollbacks, fly.loops, fly.same_as_plain) == (1, 1, 1)
    assert fly.distribution_bytes_per_round == 1000.0
    assert fly.cut_off == 1
    assert (plain.speed, fly.speed) == (10.0, 20.0)
    assert fly.speed_ratio.value == 2.0
    assert (plain.speedup.value, fly.speedup.value) == (1.0, 2.0)
    times = fly.draft_ms, fly.verify_ms, fly.judge_ms, fly.round_ms
    assert times == (50.0, 25.0, 2.0, 250.0)
    assert (fly.flips.harmful, fly.flips.helpful, fly.flips.right_there) == (1, 0, 2)
    assert fly.flips.harmful_rate_upper == upper_bound(1, 2)


def test_what_a_rule_adds_is_what_exact_has_not():
    slow = [{"num_rounds": 4}, {"num_rounds": 4, "loop_token_index": 9}]
    plain, exact, fly = reports("exact,fly", 2, exact=slow, fly=FLY)
    assert (plain.speed_base, exact.speed_base, fly.speed_base) == ("exact", None, "exact")
    assert fly.mean_accepted_tokens_ratio.value == 2.0
    assert (fly.speed_ratio.value, fly.speed) == (2.0, 20.0)
    assert (fly.loops, fly.new_loops, plain.new_loops, exact.new_loops) == (1, 0, 0, None)
    (alone,) = reports("plain", 1)
    assert (alone.new_loops, alone.mean_accepted_tokens_ratio) == (None, None)


def test_scores_of_two_conditions_are_compared():
    arms, wanted, rows = made("fly", 2, rows={"fly": FLY})
    answered = Answered("task", arms, wanted, rows)
    assert compare.score_difference(answered, "fly", "plain").value == -0.5
    found = compare.flips(answered, "plain", "fly")
    assert (found.helpful, found.harmful, found.mcnemar_p) == (1, 0, mcnemar_p(1, 0))


def test_a_speedup_is_over_plain_decoding_whatever_other_ratios_are_over():
    quick = [{"total_ns": 250_000_000}] * 2
    _, exact, fly = reports("exact,fly", 2, exact=[{"total_ns": 500_000_000}] * 2, fly=quick)
    assert (exact.speed_ratio, exact.speedup.value) == (None, 2.0)
    assert (fly.speed_base, fly.speed_ratio.value, fly.speedup.value) == ("exact", 2.0, 4.0)


def test_each_condition_is_the_first_of_some_problems():
    arms, wanted, _ = made("exact,fly", 60)
    order = [unit.arm.name for unit in wanted.values()]
    firsts = order[:: len(arms)]
    assert min(firsts.count(arm.name) for arm in arms) > 10
    for start in range(0, len(order), len(arms)):  # any beginning compares all of them
        assert set(order[start : start + len(arms)]) == {arm.name for arm in arms}


def test_a_rival_has_other_weights():
    with pytest.raises(ConfigError, match="has the weights of the target"):
        wanted_samples(EvalOptions(), [], [], TARGET, TARGET)


def test_without_answers_the_target_is_asked():
    unknown = [{"score": None, "log_likelihood": -1.0}, {"score": None, "log_likelihood": -3.0}]
    plain, fly = reports("fly", 2, plain=unknown, fly=unknown[::-1])
    assert (fly.accuracy, fly.recovery, fly.flips) == (None, None, None)
    assert plain.log_likelihood_per_token == pytest.approx(-0.2)


def test_only_what_all_conditions_have_answered_counts():
    arms, wanted, rows = made(
        "exact,fly", 4, rows={"fly": [{}, {"error": "lost"}, {"score": 0.0}, {}]}
    )
    rows = [row for row in rows if row["prompt_id"] != "problem 3" or '"fly"' in row["rule"]]
    answered = Answered("task", arms, wanted, rows)
    found = compare.report(answered)
    assert [(r.problems, r.failed) for r in found] == [(2, 0), (2, 0), (2, 1)]
    assert [r.accuracy and r.accuracy.value for r in found] == [1.0, 1.0, 0.5]
    # A condition without any sample is left out, so that the others are compared.
    rows = [row for row in rows if '"fly"' not in row["rule"]]
    answered = Answered("task", arms, wanted, rows)
    assert answered.missing == ["fly"]
    assert [r.problems for r in compare.report(answered)] == [3, 3]
    assert compare.report(Answered("task", arms, wanted, [])) == []


def test_the_last_row_of_a_sample_counts():
    arms, wanted, rows = made("fly", 2)
    failed = [{**row, "error": "lost"} for row in rows]
    found = compare.report(Answered("task", arms, wanted, failed + rows))
    assert [(r.problems, r.failed) for r in found] == [(2, 0), (2, 0)]


def test_tests_of_independent_texts_use_the_first_of_each_problem():
    # Repeats are the outer loop: texts 0 and 1 are the first of both problems.
    scores = [{"score": s} for s in (0.0, 1.0, 0.0, 0.0)]
    _, fly = reports("fly", 2, seeds=2, fly=scores)
    assert fly.samples == 4
    assert fly.accuracy.value == 0.25
    assert (fly.flips.harmful, fly.flips.problems) == (1, 2)


def test_loops_are_counted_where_the_guard_is_off_as_well():
    loops = [{"loop_token_index": 48}, {}, {"loop_guard_token_index": 48}]
    (plain,) = reports("plain", 3, plain=loops)
    assert plain.loops == 2
