"""Fronts and curves, on points whose place is known."""

from __future__ import annotations

import random

import numpy as np
import pytest

from flyspec.lab.frontier import Curve, _difference, at_equal_speed, pareto_front
from flyspec.lab.statistics import Array, PairedBootstrap


def beaten(point: tuple[float, float], by: tuple[float, float]) -> bool:
    return by != point and by[0] >= point[0] and by[1] >= point[1]


def test_the_front_is_what_nothing_beats() -> None:
    rng = random.Random(1)
    for _ in range(200):
        points = [(rng.randint(0, 5), rng.randint(0, 5)) for _ in range(rng.randint(0, 8))]
        unbeaten = {p for p in points if not any(beaten(p, q) for q in points)}
        front = [points[i] for i in pareto_front(points)]
        assert front == sorted(unbeaten)


def curve(rounds: Array, right: Array) -> Curve:
    """A text has 100 tokens."""
    return Curve(np.full_like(rounds, 100.0), rounds, right)


def test_a_point_is_compared_where_the_curve_is_as_fast() -> None:
    n = 50
    # At 5 tokens a round all are right, at 10 half; the point is at 8, with three quarters right.
    there = curve(
        np.tile([20.0, 10.0], (n, 1)),
        np.stack([np.ones(n), np.arange(n) % 2], axis=1),
    )
    point = curve(np.full((n, 1), 12.5), (np.arange(n)[:, None] % 4 > 0).astype(float))
    found = at_equal_speed(PairedBootstrap(n), point, there)
    assert found is not None
    assert found.speed == 8.0
    right = float(point.quality.mean())
    assert found.difference == pytest.approx(right - (1.0 - 0.5 * (8 - 5) / (10 - 5)))
    assert found.low < found.difference < found.high


def test_lines_are_those_of_numpy() -> None:
    rng = np.random.default_rng(3)
    rows = rng.uniform(1, 5, (300, 3 + 3 * 4))
    for row, found in zip(rows, _difference(rows, 10), strict=True):
        gained, spent, quality = row[3:].reshape(3, 4)
        order = np.argsort(gained / spent)
        there = np.interp(row[0] / row[1], (gained / spent)[order], quality[order])
        assert found == pytest.approx((row[2] - there) / 10)
        assert _difference(row, 10) == found


def test_a_curve_that_is_not_as_fast_says_nothing() -> None:
    n = 10
    there = curve(np.tile([20.0, 10.0], (n, 1)), np.ones((n, 2)))
    for rounds in (5.0, 50.0):
        point = curve(np.full((n, 1), rounds), np.ones((n, 1)))
        assert at_equal_speed(PairedBootstrap(n), point, there) is None


def test_a_rule_has_no_lead_over_itself() -> None:
    rng = np.random.default_rng(2)
    n = 80
    rounds = rng.uniform(5, 20, (n, 3))
    right = (rng.random((n, 3)) < 0.8).astype(float)
    whole = curve(rounds, right)
    middle = sorted(range(3), key=lambda i: -rounds[:, i].sum())[1]
    own = curve(rounds[:, [middle]], right[:, [middle]])
    found = at_equal_speed(PairedBootstrap(n), own, whole)
    assert found is not None
    assert found.difference == pytest.approx(0.0)
    assert found.low <= 0.0 <= found.high
