"""Percentiles, throughput, goodput, growth and the knee, as pure functions."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.figures import Figures, PhaseResult, check_goals, knee, overlap, percentile
from loadtest.load import Closed, LoadPhase
from loadtest.options import Goals
from loadtest.sampler import MemorySample, growth
from tests.loadtest.load_data import OPTIONS, done, other

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=200)
SHARES = st.floats(0, 1)
REQUESTS = st.lists(
    st.builds(done, planned=st.floats(0, 50), seconds=st.floats(0.001, 20), first=st.just(0.0),
              tokens=st.integers(0, 300)), max_size=30,
)  # fmt: skip


@given(VALUES, SHARES)
def test_a_percentile_is_the_least_value_that_covers_its_share(values, share):
    found = percentile(values, share)
    assert found in values
    assert sum(v <= found for v in values) >= share * len(values) - 1e-9
    below = [v for v in values if v < found]
    assert len(below) < share * len(values) or not below


def test_percentiles_of_a_hundred_and_of_none():
    values = list(range(1, 101))
    assert [percentile(values, s) for s in (0, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]
    assert math.isnan(percentile([], 0.5))


@given(st.floats(0, 100), st.floats(0, 100), st.lists(st.floats(0, 100), max_size=8))
def test_the_parts_of_a_request_in_neighbouring_stretches_sum_to_all_of_it(first, length, cuts):
    edges = [-1.0, *sorted(cuts), 1000.0]
    parts = [overlap(a, b, first, first + length) for a, b in pairwise(edges)]
    assert sum(parts) == pytest.approx(1.0)
    assert all(0.0 <= part <= 1.0 for part in parts)


def memory(*mib):
    return [MemorySample(1.0 * i, 100 * i, m) for i, m in enumerate(mib)]


def test_growth_is_that_of_a_warm_process():
    assert growth(memory(100, 300, 500, *[510] * 6)) == 0.0
    assert growth(memory(*range(500, 590, 10))) == 90  # over nine samples
    assert growth(memory(500)) == 0.0


def test_a_moment_of_large_messages_is_no_growth():
    assert growth(memory(*[500.0] * 117, 560, 560, 500)) == 0.0
    leaking = growth(memory(*(500 + 0.1 * i + 60 * (i % 7 == 0) for i in range(120))))
    assert leaking == pytest.approx(11.9, rel=0.05)


def step(rate, seconds):
    """A phase in which `rate` requests a second of one token each took so long."""
    records = [done(i / 8, seconds, tokens=rate) for i in range(80)] if rate else []
    phase = LoadPhase("p", Closed(1), 10.0, OPTIONS)
    return PhaseResult.of(phase, 0.0, 10.0 + seconds, records)


def test_the_knee_is_where_throughput_stops_growing_and_latency_begins():
    # A server whose step costs 1 + N / 8: the knee of its closed loop is at N = 8.
    users = [1, 2, 4, 8, 16, 32, 64]
    steps = [step(1000 * n / (1 + n / 8), 0.01 * (1 + n / 8)) for n in users]
    assert users[knee(steps)] == 8
    assert knee([step(0, 1.0), step(50, 1.0), step(60, 2.0)]) == 1
    assert knee([step(10, 1.0), step(20, 1.0), step(0, 1.0)]) == 1
    for not_reached in ([step(10, 1.0), step(20, 1.0)], [step(5, 1.0)], [step(0, 1.0)], []):
        assert knee(not_reached) is None


# --- requests ---------------------------------------------------------------------------------


def test_times_count_from_when_a_request_was_due():
    late = done(planned=1.0, seconds=2.0, first=0.5, tokens=16, sent=1.25)
    assert late.metric("e2e") == pytest.approx(2000)
    assert late.metric("ttft") == pytest.approx(500)
    assert late.metric("tpot") == pytest.approx(100)
    assert done(tokens=1).metric("tpot") is None
    assert other("refused").metric("e2e") is None


def test_outcomes_are_counted_apart():
    records = [done(), done(planned=1.0), other("refused", retry_after_s=1.0), other("refused"),
               other("cancelled"), other("failed", error="x")]  # fmt: skip
    figures = Figures.of(records, 0.0, 2.0, {"e2e": 1500.0})
    assert (figures.sent, figures.complete, figures.refused) == (6, 2, 2)
    assert (figures.cancelled, figures.failed) == (1, 1)
    assert figures.requests_per_s == 1.0
    assert figures.tokens_per_s == 11.0
    assert figures.tokens_per_round == 5.5
    assert figures.e2e.count == 2
    assert figures.goodput == 2 / 5
    assert Figures.of(records, 0.0, 2.0).goodput is None
    assert math.isnan(Figures.of([], 0.0, 1.0).e2e.p99)


@given(REQUESTS, st.floats(1, 30_000), st.floats(1, 30_000))
def test_goodput_is_a_share_that_grows_with_the_limit(records, one, another):
    low, high = sorted((one, another))
    few, many = (Figures.of(records, 0, 60, {"e2e": ms}).goodput for ms in (low, high))
    if not records:
        assert few is None
        return
    assert 0 <= few <= many <= 1
    assert few * len(records) == pytest.approx(sum(r.metric("e2e") <= low for r in records))
    assert Figures.of(records, 0, 60, {"e2e": low, "ttft": high}).goodput <= few


@given(REQUESTS)
def test_no_token_is_lost(records):
    whole = Figures.of(records, 0.0, 80.0)
    assert whole.tokens_per_s * 80.0 == pytest.approx(sum(r.tokens for r in records), rel=1e-6)


# --- goals ------------------------------------------------------------------------------------


def result(records, judged=True, limits=None):
    phase = LoadPhase("p", Closed(1), 10.0, OPTIONS, judged=judged)
    return PhaseResult.of(phase, 0.0, 10.0, records, limits)


def test_goals_are_about_judged_phases_and_failures_about_all():
    slow = [done(planned=float(i), seconds=3.0) for i in range(9)] + [other("failed", error="x")]
    within = {"e2e": 2000.0}
    goals = Goals(latency=within, min_goodput=0.9, max_p99=within)
    checks = {c.name: c for c in check_goals(goals, [result(slow, limits=within)])}
    broken = {name for name, c in checks.items() if not c.passed}
    assert broken == {"failures", "p99 e2e", "goodput"}
    assert checks["p99 e2e"].said == "p: 3000 ms, bound 2000 ms"
    unjudged = check_goals(goals, [result(slow, judged=False, limits=within)])
    assert [c.name for c in unjudged] == ["failures"]


def test_a_goal_of_a_phase_without_completed_requests_is_missed():
    refused = result([other("refused", retry_after_s=1.0)])
    (check,) = check_goals(Goals(max_p99={"ttft": 5.0}), [refused])[1:]
    assert not check.passed
