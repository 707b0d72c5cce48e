"""Curves of conditions, and what is compared with them, on samples whose figures are known."""

from __future__ import annotations

import pytest

from flyspec_lab.answered import Answered
from flyspec_lab.curves import curves_of, equal_costs, is_exact
from tests.lab.test_compare import made


def test_rules_are_compared_where_they_are_as_fast() -> None:
    rules = "exact,fly:fly_entropy_threshold=0.2,fly:fly_entropy_threshold=0.6,random,typical"
    fast = [{"num_rounds": 1, "total_ns": 10**8}] * 20
    middle = [{"num_rounds": 3, "total_ns": 3 * 10**8}] * 20
    rows = {
        "fly:fly_entropy_threshold=0.2": fast, "fly:fly_entropy_threshold=0.6": middle,
        "random": [{"num_rounds": 2.5, "total_ns": 25 * 10**7, "score": 0.0}] * 20,
        "typical": [{"num_rounds": 2, "total_ns": 2 * 10**8, "score": float(i % 2)}
                    for i in range(20)],
    }  # fmt: skip
    arms, wanted, found = made(rules, 20, rows=rows)
    costs = equal_costs(Answered("task", arms, wanted, found))
    by_condition = {(c.condition, c.of): c for c in costs}
    typical = by_condition["typical", "fly"]
    assert typical.acceptance is not None
    assert typical.acceptance.speed == 5.0
    assert typical.acceptance.difference == pytest.approx(-0.5)
    assert typical.acceptance.low < -0.5 < typical.acceptance.high
    assert typical.speed is not None
    assert typical.speed.difference == pytest.approx(-0.5)
    # `random` makes a curve with `exact`; what is faster than that cannot be compared.
    # At 1 token a round all are right, at 4 none: at 10 / 3 tokens, 2 of 9 are.
    slower = by_condition["fly:fly_entropy_threshold=0.6", "random"]
    assert slower.acceptance is not None
    assert slower.acceptance.difference == pytest.approx(1 - 2 / 9)
    assert set(by_condition) == {
        ("typical", "fly"), ("fly:fly_entropy_threshold=0.6", "random"),
    }  # fmt: skip


def test_a_curve_has_what_differs_in_thresholds_only() -> None:
    rules = (
        "exact,fuzzy,fuzzy:divergence=kl,fuzzy:divergence_threshold=0.2,fly,"
        "fly:fly_window_size=0,fly:fly_window_size=0,fly_entropy_threshold=0.1"
    )
    arms = made(rules, 1)[0]
    assert {name: len(of) for name, of in curves_of(arms).items()} == {
        "exact": 1, "fuzzy, js": 2, "fuzzy, kl": 1, "fly, W = 6": 1, "fly, W = 0": 2,
    }  # fmt: skip


def test_phases_are_a_curve_by_themselves() -> None:
    phased = "exact until #### then fly"
    arms = made(f"exact,fly,{phased}", 1)[0]
    assert list(curves_of(arms)) == ["exact", "fly", phased]
    assert [is_exact(arm) for arm in arms] == [True, True, False, False]
