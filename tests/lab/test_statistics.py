"""Statistics against known answers, other libraries, brute force and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from flyspec_lab.statistics import (
    Flips,
    Interval,
    PairedBootstrap,
    exact_interval,
    mcnemar_p,
    ratio,
    upper_bound,
)


@pytest.mark.parametrize(("won", "lost"), [(0, 0), (0, 1), (3, 3), (5, 1), (1, 9), (20, 41)])
def test_mcnemar_is_a_fair_coin_tossed(won, lost):
    n = won + lost
    of_each = {i: math.comb(n, i) / 2**n for i in range(n + 1)}
    extreme = [p for i, p in of_each.items() if abs(2 * i - n) >= abs(won - lost)]
    assert mcnemar_p(won, lost) == pytest.approx(sum(extreme))


def test_exact_intervals_are_where_the_tails_of_the_binomial_say():
    for count, of in ((0, 20), (3, 20), (20, 20), (7, 500)):
        low, high = exact_interval(count, of)
        bound = upper_bound(count, of)
        if count > 0:
            assert stats.binom.sf(count - 1, of, low) == pytest.approx(0.025, rel=1e-6)
        if count < of:
            assert stats.binom.cdf(count, of, high) == pytest.approx(0.025, rel=1e-6)
            assert stats.binom.cdf(count, of, bound) == pytest.approx(0.05, rel=1e-6)
    assert upper_bound(0, 300) == pytest.approx(3 / 300, rel=0.01)  # the rule of three
    assert exact_interval(0, 0) == (0.0, 1.0)
    assert upper_bound(0, 0) == 1.0


def test_the_exact_bound_holds_as_often_as_it_says():
    """Over all outcomes of a binomial, by their probabilities: no simulation needed."""
    for share, of in ((0.01, 487), (0.05, 50), (0.3, 50)):
        chances = stats.binom.pmf(np.arange(of + 1), of, share)
        likely = np.flatnonzero(chances > 1e-6)
        holds = np.array([upper_bound(int(c), of) >= share for c in likely])
        assert chances[likely[holds]].sum() >= 0.95


def answers(
    rng: np.random.Generator, n: int, accuracy: float, harmful: float, helpful: float
) -> tuple[np.ndarray, np.ndarray]:
    """Draw right answers of plain decoding and of a rule that flips some of them."""
    plain = rng.random(n) < accuracy
    flips = rng.random(n)
    rule = np.where(plain, flips >= harmful, flips < helpful)
    return plain, rule


def test_intervals_agree_with_scipy():
    rng = np.random.default_rng(2)
    plain, rule = answers(rng, 400, 0.8, 0.06, 0.1)
    values = np.stack([rule, plain], axis=1).astype(float)
    for method in ("BCa", "percentile"):
        ours = PairedBootstrap(len(values)).interval(values, ratio, method)
        theirs = stats.bootstrap(
            (values[:, 0], values[:, 1]),
            lambda a, b, axis: a.sum(axis=axis) / b.sum(axis=axis),
            paired=True, vectorized=True, method=method, n_resamples=10_000,
            rng=np.random.default_rng(3), batch=500,
        ).confidence_interval  # fmt: skip
        assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.004)
        assert ours.value == rule.sum() / plain.sum()


def test_the_interval_of_a_recovery_covers_it_as_often_as_it_says():
    rng = np.random.default_rng(4)
    accuracy, harmful, helpful, n, runs = 0.9, 0.02, 0.2, 300, 200
    truth = (accuracy * (1 - harmful) + (1 - accuracy) * helpful) / accuracy
    covered = 0
    for _ in range(runs):
        plain, rule = answers(rng, n, accuracy, harmful, helpful)
        values = np.stack([rule, plain], axis=1).astype(float)
        found = PairedBootstrap(n, resamples=500).interval(values, ratio)
        covered += found.low <= truth <= found.high
    # Three standard errors of a binomial of 200; counts of few flips are coarse, too.
    assert covered / runs == pytest.approx(0.95, abs=0.047)


def test_problems_are_resampled_whole():
    """Ten equal texts of a problem say no more than one."""
    rng = np.random.default_rng(5)
    plain, rule = answers(rng, 200, 0.8, 0.1, 0.1)
    once = np.stack([rule, plain], axis=1).astype(float)
    one = PairedBootstrap(200).interval(once, ratio)
    ten = PairedBootstrap(200).interval(10 * once, ratio)
    assert (one.low, one.high) == pytest.approx((ten.low, ten.high))


def test_what_never_differs_has_no_interval_around_it():
    values = np.ones((50, 2))
    found = PairedBootstrap(50).interval(values, ratio)
    assert (found.value, found.low, found.high) == (1.0, 1.0, 1.0)
    assert PairedBootstrap(50).interval(np.zeros((50, 2)), ratio) is None


def test_a_report_repeats():
    values = np.random.default_rng(6).random((40, 2))
    assert PairedBootstrap(40).interval(values, ratio) == PairedBootstrap(40).interval(
        values, ratio
    )


def test_resamples_draw_each_problem_with_equal_chance():
    counts = PairedBootstrap(30, resamples=5000).sums(np.eye(30))
    assert (counts.sum(axis=1) == 30).all()
    assert counts.mean(axis=0) == pytest.approx(1.0, abs=0.07)
    assert counts.var(axis=0) == pytest.approx(1 - 1 / 30, abs=0.12)


def test_flips_are_counted_both_ways():
    right = np.array([True, True, False, False, True])
    there = np.array([True, False, True, True, True])
    flips = Flips.of(right, there)
    assert (flips.harmful, flips.helpful, flips.right_there, flips.problems) == (2, 1, 4, 5)
    assert flips.harmful_rate_upper == upper_bound(2, 4)
    assert flips.mcnemar_p == mcnemar_p(1, 2)
    nothing = Flips.of(np.array([False]), np.array([False]))
    assert nothing.harmful_rate_upper == 1.0


def test_a_single_problem_has_an_interval_without_width():
    found = PairedBootstrap(1).interval(np.array([[6.0, 2.0]]), ratio)
    assert found == Interval(3.0, 3.0, 3.0)
