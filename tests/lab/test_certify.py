"""Certificates: against a slow statement of the test, and the promise itself by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyspec_lab.tuning.search import Promise, certify


def slow(columns, num_prompts, max_rate, risk):
    """The loosest certified threshold, from the binomial's definition."""
    found = None
    for index, count in enumerate(columns):
        p = sum(
            math.comb(num_prompts, k) * max_rate**k * (1 - max_rate) ** (num_prompts - k)
            for k in range(count + 1)
        )
        if p > risk:
            break
        found = index
    return found


@given(
    columns=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    num_prompts=st.integers(12, 300),
    max_rate=st.sampled_from([0.01, 0.02, 0.1]),
    confidence=st.sampled_from([0.8, 0.9, 0.95]),
)
def test_equals_the_definition(columns, num_prompts, max_rate, confidence):
    flips = np.arange(num_prompts)[:, None] < np.array(columns)
    promise = Promise(max_rate, confidence)
    certificate = certify(flips, promise)
    assert certificate.index == slow(columns, num_prompts, max_rate, promise.risk)
    shown = columns[certificate.index or 0]
    assert (certificate.num_prompts, certificate.num_flips) == (num_prompts, shown)
    assert bool(certificate.problem) == (certificate.index is None)


@pytest.mark.parametrize("max_rate", [0.005, 0.01, 0.05])
def test_the_smallest_sample_is_the_smallest(max_rate):
    promise = Promise(max_rate, 0.9)
    enough = promise.min_prompts
    assert certify(np.zeros((enough, 1), bool), promise).index == 0
    too_few = certify(np.zeros((enough - 1, 1), bool), promise)
    assert too_few.index is None
    assert f"needs at least {enough}" in too_few.problem


def test_too_many_flips_are_named():
    flips = np.ones((500, 2), bool)
    assert "flips 500 of 500" in certify(flips, Promise(0.01, 0.9)).problem


def test_the_promise_holds_for_draws_from_a_known_law():
    """Rates around the limit, where breaking it is likeliest."""
    promise, rng = Promise(0.02, 0.9), np.random.default_rng(1)
    rates = np.array([0.005, 0.012, 0.0201, 0.03])
    broken, trials = 0, 2000
    for _ in range(trials):
        index = certify(rng.random((400, 4)) < rates, promise).index
        broken += index is not None and rates[index] > promise.max_rate
    assert broken / trials <= promise.risk + 3 * math.sqrt(
        promise.risk * (1 - promise.risk) / trials
    )


def test_certificates_that_share_a_risk_hold_together():
    assert Promise(0.02, 0.9).shared(8).risk == pytest.approx(0.0125)
    assert Promise(0.02, 0.9).shared(8).min_prompts == 217
