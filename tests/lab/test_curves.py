"""Curves of conditions, what is compared with them, and the plot, on points that are known."""

from __future__ import annotations

import numpy as np
import pytest

from flyspec_lab.answered import Answered
from flyspec_lab.arms import rival_arm
from flyspec_lab.curves import (
    _difference,
    at_equal_speed,
    curves_of,
    equal_costs,
    is_exact,
)
from flyspec_lab.drawing import save
from flyspec_lab.evaluation import Found
from flyspec_lab.plots import quality_plot
from flyspec_lab.statistics import Array, PairedBootstrap
from tests.lab.test_compare import made


def test_rules_are_compared_where_they_are_as_fast():
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
    assert typical.acceptance.speed == 5.0
    assert typical.acceptance.difference == pytest.approx(-0.5)
    assert typical.acceptance.low < -0.5 < typical.acceptance.high
    assert typical.speed.difference == pytest.approx(-0.5)
    # `random` makes a curve with `exact`; what is faster than that cannot be compared.
    # At 1 token a round all are right, at 4 none: at 10 / 3 tokens, 2 of 9 are.
    slower = by_condition["fly:fly_entropy_threshold=0.6", "random"]
    assert slower.acceptance.difference == pytest.approx(1 - 2 / 9)
    assert set(by_condition) == {
        ("typical", "fly"), ("fly:fly_entropy_threshold=0.6", "random"),
    }  # fmt: skip


def test_a_curve_has_what_differs_in_thresholds_only():
    rules = (
        "exact,fuzzy,fuzzy:divergence=kl,fuzzy:divergence_threshold=0.2,fly,"
        "fly:fly_window_size=0,fly:fly_window_size=0,fly_entropy_threshold=0.1"
    )
    arms = made(rules, 1)[0]
    assert {name: len(of) for name, of in curves_of(arms).items()} == {
        "exact": 1, "fuzzy, js": 2, "fuzzy, kl": 1, "fly, W = 6": 1, "fly, W = 0": 2,
    }  # fmt: skip


def test_phases_are_a_curve_by_themselves():
    phased = "exact until #### then fly"
    arms = made(f"exact,fly,{phased}", 1)[0]
    assert list(curves_of(arms)) == ["exact", "fly", phased]
    assert [is_exact(arm) for arm in arms] == [True, True, False, False]


def curve(rounds: Array, right: Array) -> Array:
    """A text has 100 tokens."""
    return np.concatenate([np.full_like(rounds, 100.0), rounds, right], axis=1)


def test_a_point_is_compared_where_the_curve_is_as_fast():
    n = 50
    # At 5 tokens a round all are right, at 10 half; the point is at 8, with three quarters right.
    there = curve(
        np.tile([20.0, 10.0], (n, 1)),
        np.stack([np.ones(n), np.arange(n) % 2], axis=1),
    )
    point = curve(np.full((n, 1), 12.5), (np.arange(n)[:, None] % 4 > 0).astype(float))
    found = at_equal_speed(PairedBootstrap(n), point, there)
    assert found.speed == 8.0
    right = float(point[:, 2].mean())
    assert found.difference == pytest.approx(right - (1.0 - 0.5 * (8 - 5) / (10 - 5)))
    assert found.low < found.difference < found.high


def test_lines_are_those_of_numpy():
    rng = np.random.default_rng(3)
    rows = rng.uniform(1, 5, (300, 3 + 3 * 4))
    for row, found in zip(rows, _difference(rows, 10), strict=True):
        gained, spent, quality = row[3:].reshape(3, 4)
        order = np.argsort(gained / spent)
        there = np.interp(row[0] / row[1], (gained / spent)[order], quality[order])
        assert found == pytest.approx((row[2] - there) / 10)
        assert _difference(row, 10) == found


def test_a_curve_that_is_not_as_fast_says_nothing():
    n = 10
    there = curve(np.tile([20.0, 10.0], (n, 1)), np.ones((n, 2)))
    for rounds in (5.0, 50.0):
        point = curve(np.full((n, 1), rounds), np.ones((n, 1)))
        assert at_equal_speed(PairedBootstrap(n), point, there) is None


def test_a_rule_has_no_lead_over_itself():
    rng = np.random.default_rng(2)
    n = 80
    rounds = rng.uniform(5, 20, (n, 3))
    right = (rng.random((n, 3)) < 0.8).astype(float)
    whole = curve(rounds, right)
    middle = sorted(range(3), key=lambda i: -rounds[:, i].sum())[1]
    own = curve(rounds[:, [middle]], right[:, [middle]])
    found = at_equal_speed(PairedBootstrap(n), own, whole)
    assert found.difference == pytest.approx(0.0)
    assert found.low <= 0.0 <= found.high


def test_beyond_its_fastest_end_a_curve_may_count():
    n = 10
    there = curve(np.tile([20.0, 10.0], (n, 1)), np.tile([1.0, 0.5], (n, 1)))
    fast, slow = (curve(np.full((n, 1), rounds), np.ones((n, 1))) for rounds in (5.0, 50.0))
    found = at_equal_speed(PairedBootstrap(n), fast, there, beyond=True)
    assert found.difference == 0.5
    assert at_equal_speed(PairedBootstrap(n), slow, there, beyond=True) is None


def test_a_plot_names_rules_and_thresholds(tmp_path):
    rules = "exact,fly:fly_entropy_threshold=0.2,fly:fly_entropy_threshold=0.6"
    rows = {
        "fly:fly_entropy_threshold=0.2": [{"num_rounds": 1, "score": i > 0} for i in range(8)],
        "fly:fly_entropy_threshold=0.6": [{"num_rounds": 2}] * 8,
    }
    arms, wanted, found = made(rules, 8, rows=rows)
    of = Found.on(Answered("task", arms, wanted, found), [*arms, rival_arm("small")])
    plot = quality_plot("quality", [of, Found("empty", arms, [])])
    svg = plot.svg
    shown = [
        "task, 8 problems", "exact", "fly", ">0.2<", ">0.6<", "plain",
        "tokens per round", "tokens per second, relative to exact", "recovery",
    ]  # fmt: skip
    assert [text for text in shown if text not in svg] == []
    save(tmp_path / "plot.png", plot.inches, plot.draw)
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_without_answers_the_likelihood_is_shown():
    unknown = [{"score": None, "log_likelihood": -4.0}] * 3
    arms, wanted, found = made("fly", 3, rows={"plain": unknown, "fly": unknown})
    of = Found.on(Answered("task", arms, wanted, found), arms)
    assert "log p per token, nats" in quality_plot("quality", [of]).svg
