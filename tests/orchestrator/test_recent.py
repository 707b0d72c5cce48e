"""Estimates of which recent observations count most."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.generation.recent import SLOPE_MEMORY, SLOPE_PRIOR, Recent, RecentSlope

counts = st.lists(st.integers(1, 32), min_size=1, max_size=60)
times = st.floats(0, 1e9)


@given(counts, times, times)
def test_a_slope_is_told_from_counts_that_differ(counts, fixed, each):
    """A line's slope, drawn to the mean per count where they hardly do."""
    slope = RecentSlope()
    assert (slope.known, slope.value) == (False, 0.0)
    for count in counts:
        slope.observe(fixed + each * count, count)
    weights = SLOPE_MEMORY ** np.arange(len(counts))[::-1]
    average = np.average(counts, weights=weights)
    variance = np.average((np.array(counts) - average) ** 2, weights=weights)
    mean = fixed / average + each
    expected = (variance * each + SLOPE_PRIOR * mean) / (variance + SLOPE_PRIOR)
    assert slope.known
    assert slope.value == pytest.approx(expected, rel=1e-6, abs=1e-3)


@given(st.lists(st.tuples(times, st.integers(1, 32)), min_size=1, max_size=60))
def test_a_slope_is_between_nothing_and_the_mean(observations):
    slope = RecentSlope()
    amount = count = 0.0
    for each in observations:
        slope.observe(*each)
        amount = SLOPE_MEMORY * amount + each[0]
        count = SLOPE_MEMORY * count + each[1]
        assert 0 <= slope.value <= amount / count * (1 + 1e-9)


def test_a_slope_follows_a_drafter_that_becomes_slow():
    slope = RecentSlope()
    for each in (1e5, 1e6):
        for number in range(60):
            slope.observe(1e6 + each * (4 + number % 12), 4 + number % 12)
        assert slope.value == pytest.approx(each, rel=0.35)


def test_a_mean_forgets():
    mean = Recent(5.0, memory=0.5, prior=1.0)
    assert (mean.known, mean.value) == (True, 5.0)
    for _ in range(20):
        mean.observe(12.0, 4)
    assert mean.value == pytest.approx(3.0, rel=1e-3)
    assert not Recent(5.0).known
