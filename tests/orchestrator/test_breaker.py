"""The circuit breaker keeps its promises over random histories."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyspec.values.admin import BreakerState
from orchestrator.fleet.breaker import (
    FORGIVEN_S,
    HUNG_FIRST_S,
    HUNG_LONGEST_S,
    MAX_FAULTS,
    OUT_FIRST_S,
    OUT_LONGEST_S,
    SETTLED_S,
    Breaker,
)

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["failed", "answered", "succeeded", "begin", "abandoned"]),
        st.floats(0.0, 3.0) | st.floats(0.0, 30.0),
    ),
    max_size=60,
)


@given(STEPS, st.booleans(), st.floats(0.0, 1.0))
def test_after_a_failure_nothing_is_sent_before_an_answer_and_one_trial_at_a_time(
    steps, trials, jitter
):
    breaker = Breaker(0.1, 2.0, trials, trial_s=1.0, jitter=lambda: jitter)
    now, failures, failed_at, trial_until = 0.0, 0, 0.0, 0.0
    for event, elapsed in steps:
        now += elapsed
        if event == "begin":
            if not breaker.allows(now):
                continue
            breaker.begin(now)
            if breaker.state is BreakerState.HALF_OPEN:
                trial_until = now + 1.0
                assert not breaker.allows(now)
                assert breaker.allows(trial_until)
        elif event == "failed" and breaker.state is BreakerState.OPEN and now < breaker.retry_at:
            before = breaker.retry_at
            breaker.failed(now)
            assert breaker.retry_at == before, "the same incident"
        elif event == "failed":
            breaker.failed(now)
            failures = 0 if now - failed_at > SETTLED_S else failures
            failed_at = now
            rest = breaker.retry_at - now
            longest = min(2.0, 0.1 * 2**failures)
            assert longest / 2 - 1e-9 <= rest <= longest + 1e-9
            failures += 1
            assert not breaker.allows(now + 100)  # until it answers
        elif event == "answered":
            before, early = breaker.state, now < breaker.retry_at
            breaker.answered(now)
            if before is BreakerState.OPEN and not early:
                assert breaker.state is (BreakerState.HALF_OPEN if trials else BreakerState.CLOSED)
                assert breaker.allows(now)
            else:
                assert breaker.state is before
        elif event == "succeeded":
            breaker.succeeded()
            assert breaker.allows(now)
        else:
            breaker.abandoned()
            assert breaker.allows(now) == (breaker.state is not BreakerState.OPEN)


def test_a_trial_that_nothing_is_heard_of_does_not_block_for_ever():
    breaker = Breaker(trial_s=3.0)
    breaker.failed(0.0)
    breaker.answered(10.0)
    breaker.begin(10.0)
    assert not breaker.allows(12.9)
    assert breaker.allows(13.0)


def fault_until_out(breaker, now):
    """Cause faults, each after a successful retry; return the time of the last."""
    for _ in range(MAX_FAULTS):
        assert not breaker.is_out
        breaker.faulted(now)
        last, now = now, breaker.retry_at + 1.0
        if not breaker.is_out:
            breaker.answered(now)
            breaker.succeeded()
    assert breaker.is_out
    return last


def test_after_a_few_faults_it_rests_for_long_whatever_works_in_between():
    breaker = Breaker(jitter=lambda: 0.0)
    now = fault_until_out(breaker, 1000.0)
    assert breaker.retry_at == now + OUT_FIRST_S
    breaker.succeeded()
    breaker.answered(now + OUT_FIRST_S - 1)
    assert breaker.state is BreakerState.OPEN
    breaker.faulted(now + 1)  # of another session: the same incident
    assert breaker.retry_at == now + OUT_FIRST_S
    rests = []
    for _ in range(10):
        now = breaker.retry_at
        breaker.answered(now)
        assert breaker.state is BreakerState.HALF_OPEN
        breaker.succeeded()
        breaker.faulted(now + 1)
        rests.append(breaker.retry_at - now - 1)
    assert rests == pytest.approx([min(OUT_LONGEST_S, OUT_FIRST_S * 2**n) for n in range(1, 11)])


def test_faults_are_forgiven_long_after_the_rest():
    breaker = Breaker(jitter=lambda: 0.0)
    fault_until_out(breaker, 1000.0)
    now = breaker.retry_at
    breaker.answered(now)
    breaker.succeeded()
    breaker.faulted(now + FORGIVEN_S + 1)
    assert not breaker.is_out


def hang_again(breaker, now):
    """It answers a probe, one session tries it, and it hangs again; return its rest."""
    breaker.answered(breaker.retry_at)
    assert breaker.state is BreakerState.HALF_OPEN, "whatever it says, one tries first"
    breaker.begin(breaker.retry_at)
    assert not breaker.allows(breaker.retry_at)
    breaker.hung(now)
    return breaker.retry_at - now


@pytest.mark.parametrize("trials", [True, False])
@pytest.mark.parametrize("timeout_s", [0.5, 60.0])
def test_one_that_hangs_rests_longer_each_time(trials, timeout_s):
    breaker = Breaker(longest_s=0.4, trials=trials, trial_s=100.0, jitter=lambda: 0.0)
    breaker.hung(now := 1000.0)
    rests = [breaker.retry_at - now]
    breaker.hung(now + 0.5)  # another session's: the same incident
    assert breaker.retry_at == now + HUNG_FIRST_S
    for _ in range(7):
        now = breaker.retry_at + timeout_s
        rests.append(hang_again(breaker, now))
    assert rests == pytest.approx([min(HUNG_LONGEST_S, HUNG_FIRST_S * 2**n) for n in range(8)])
    breaker.answered(breaker.retry_at)
    breaker.succeeded()
    assert breaker.allows(breaker.retry_at)
    breaker.hung(now := breaker.retry_at + 1.0)
    assert breaker.retry_at - now == HUNG_LONGEST_S, "it worked for a moment only"
    breaker.answered(now := breaker.retry_at)
    breaker.succeeded()
    breaker.hung(now := now + SETTLED_S + 1)
    assert breaker.retry_at - now == HUNG_FIRST_S


def test_one_that_hung_and_is_lost_rests_no_longer_for_it():
    breaker = Breaker(longest_s=0.4, trials=False, jitter=lambda: 0.0)
    breaker.hung(1000.0)
    now = breaker.retry_at + 1.0
    breaker.answered(now)
    breaker.failed(now)  # it ended, to be started again
    assert breaker.retry_at - now <= 0.4
    breaker.answered(now := breaker.retry_at)
    breaker.succeeded()
    breaker.failed(now)
    breaker.answered(breaker.retry_at)
    assert breaker.state is BreakerState.CLOSED
