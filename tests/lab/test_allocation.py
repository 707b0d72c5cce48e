"""Leads over a random allocation of problems, by a bootstrap written out and by known answers."""

from __future__ import annotations

import numpy as np
import pytest

from flyspec.rules.presets import RULE_PRESETS
from flyspec.values.admin import ModelInfo
from flyspec_lab.answered import Answered
from flyspec_lab.arms import make_arms, rival_arm
from flyspec_lab.bench.conditions import parse_conditions
from flyspec_lab.curves import allocation_from, equal_costs
from flyspec_lab.options import EvalOptions
from flyspec_lab.problems import TaskProblems
from flyspec_lab.run import wanted_samples
from flyspec_lab.tasks import Problem
from flyspec_lab.tasks.word_problems import WordProblems
from tests.lab.test_compare import TARGET, TOKENS, rows_of

DRAFT = ModelInfo("draft", "", 100, 100, weights_fingerprint="d")
COUNT = 40
SECOND = 1_000_000_000


def answered(scores, times, seeds=1):
    """Return texts with these scores and times, by condition: a function of the problem each."""
    arms = [
        *make_arms(parse_conditions("exact,fuzzy"), (), 15, "model", [*RULE_PRESETS]),
        rival_arm("draft"),
    ]
    task = TaskProblems(
        "task", WordProblems(), [Problem(f"problem {i}", "Q", "7") for i in range(COUNT)]
    )
    wanted = wanted_samples(EvalOptions(seeds=seeds), [task], arms, TARGET, DRAFT)

    def own(unit):
        return {
            "score": float(scores[unit.arm.name](unit.index)),
            "total_ns": int(times[unit.arm.name](unit.index) * SECOND),
        }

    return Answered("task", arms, wanted, rows_of(wanted, own))


SCORES = {
    "plain": lambda i: i % 10 > 0,
    "exact": lambda i: i % 10 > 0,
    "fuzzy": lambda i: i % 5 > 0,
    "draft alone": lambda i: i % 2,
}
TIMES = {
    "plain": lambda i: 4.0 + i % 3,
    "exact": lambda i: 3.0,
    "fuzzy": lambda i: 1.5 + i % 2,
    "draft alone": lambda i: 1.0,
}


def lead_of(found, large):
    (one,) = (c for c in equal_costs(found) if c.of == allocation_from(large))
    assert one.condition == "fuzzy"
    return one.speed


def line(times, large, drawn):
    """Return fuzzy's score less that of the line to the draft, of the problems that were drawn."""

    def speed(name):
        return TOKENS * len(drawn) / sum(times[name](i) for i in drawn)

    def score(name):
        return sum(SCORES[name](i) for i in drawn) / len(drawn)

    share = (speed("fuzzy") - speed(large)) / (speed("draft alone") - speed(large))
    share = min(1.0, max(0.0, share))
    return score("fuzzy") - ((1 - share) * score(large) + share * score("draft alone"))


@pytest.mark.parametrize("large", ["plain", "exact"])
def test_an_interval_is_that_of_resampled_problems(large):
    lead = lead_of(answered(SCORES, TIMES), large)
    assert lead.difference == pytest.approx(line(TIMES, large, range(COUNT)))
    rng = np.random.default_rng(5)
    found = [line(TIMES, large, rng.integers(COUNT, size=COUNT)) for _ in range(1500)]
    low, high = np.quantile(found, [0.025, 0.975])
    assert lead.low == pytest.approx(low, abs=0.02)
    assert lead.high == pytest.approx(high, abs=0.02)


def test_a_problem_with_several_texts_counts_once():
    once = lead_of(answered(SCORES, TIMES), "plain")
    thrice = lead_of(answered(SCORES, TIMES, seeds=3), "plain")
    assert thrice.difference == pytest.approx(once.difference)
    assert (thrice.low, thrice.high) == pytest.approx((once.low, once.high))


def test_beyond_the_small_model_its_own_score_counts():
    times = {**TIMES, "fuzzy": lambda i: 0.5}
    lead = lead_of(answered(SCORES, times), "plain")
    assert lead.difference == pytest.approx(0.8 - 0.5)


def test_slower_than_the_large_model_there_is_no_line():
    times = {**TIMES, "fuzzy": lambda i: 9.0}
    assert lead_of(answered(SCORES, times), "plain") is None


def test_without_a_rival_there_is_no_line():
    of = answered(SCORES, TIMES)
    of.arms = [arm for arm in of.arms if not arm.rival]
    assert equal_costs(of) == []
