"""Resplits: against a slow count of the same samples, and against the laws that they follow."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, hypergeom

from flyspec import bundled
from flyspec.config import DraftSettings, VerifySettings
from flyspec.errors import InvalidArgumentError
from flyspec_lab.certify import Promise
from flyspec_lab.local_model import LocalModel
from flyspec_lab.resplits import resplit, samples_of
from flyspec_lab.tasks import TASKS
from flyspec_lab.tuning.record import Recorder
from flyspec_lab.tuning.replay import RuleReplay
from flyspec_lab.tuning.search import AXES, candidates, flips_of
from tests.lab.test_certify import slow


def counted(table, indices):
    """Flips of each threshold among the prompts with these indices, one by one."""
    return [sum(bool(table[i][t]) for i in indices) for t in range(len(table[0]))]


def told(tables, promise, samples):
    """For each of the samples: the certified thresholds of all rules, by the definitions."""
    risk = (1 - promise.confidence) / len(tables)
    for sample in samples:
        yield {
            name: slow(counted(table, sample), len(sample), promise.max_rate, risk)
            for name, table in tables.items()
        }


def broken_by(tables, promise, certified):
    """Rules whose certified threshold flips too many of all prompts."""
    found = set()
    for name, index in certified.items():
        count = len(tables[name])
        flips = counted(tables[name], range(count))
        if index is not None and Fraction(flips[index], count) > Fraction(str(promise.max_rate)):
            found.add(name)
    return found


@settings(max_examples=30, deadline=None)
@given(
    num_prompts=st.integers(2, 60),
    rates=st.lists(st.lists(st.floats(0, 0.4), min_size=1, max_size=4), min_size=1, max_size=3),
    max_rate=st.sampled_from([0.05, 0.1, 0.3]),
    confidence=st.sampled_from([0.5, 0.9]),
    seed=st.integers(0, 99),
)
def test_equals_a_count_of_the_same_samples(num_prompts, rates, max_rate, confidence, seed):
    rng, promise, draws = np.random.default_rng(seed), Promise(max_rate, confidence), 12
    tables = {f"rule {i}": rng.random((num_prompts, len(r))) < r for i, r in enumerate(rates)}
    found = resplit(tables, promise, draws, seed)
    samples = list(samples_of(num_prompts, draws, seed))
    for kind, place in (("halves", 0), ("redraws", 2)):
        certified = list(told(tables, promise, [sample[place] for sample in samples]))
        broken = [broken_by(tables, promise, c) for c in certified]
        together = getattr(found, kind)
        assert together.broken == sum(map(bool, broken))
        assert together.certified == sum(any(i is not None for i in c.values()) for c in certified)
        for name, rule in found.rules.items():
            own = getattr(rule, kind)
            assert own.broken == sum(name in names for names in broken)
            assert own.certified == sum(c[name] is not None for c in certified)
            assert (own.share, own.draws) == (own.broken / draws, draws)
            assert own.risk == pytest.approx((1 - confidence) / len(tables))
        if kind == "halves":
            _check_other_halves(tables, promise, found, samples, certified)


def _check_other_halves(tables, promise, found, samples, certified):
    for name, table in tables.items():
        held_out = [
            counted(table, rest)[c[name]] / len(rest)
            for (_, rest, _), c in zip(samples, certified, strict=True)
            if c[name] is not None
        ]
        rule = found.rules[name]
        assert rule.held_out_above == sum(rate > promise.max_rate for rate in held_out)
        if held_out:
            assert rule.held_out_rate == pytest.approx(sum(held_out) / len(held_out))
        else:
            assert rule.held_out_rate is None


def test_halves_are_halves_and_redraws_are_drawn_from_all():
    for half, rest, redraw in samples_of(11, 50, seed=1):
        assert sorted([*half, *rest]) == list(range(11))
        assert (len(half), len(rest), len(redraw)) == (5, 6, 11)
        assert set(redraw) <= set(range(11))
    seen = np.concatenate([redraw for *_, redraw in samples_of(11, 500, seed=1)])
    assert np.bincount(seen).min() > 400


def most_flips(size, promise):
    """The largest count of flips among `size` prompts that is certified."""
    return int(np.flatnonzero(binom.cdf(np.arange(size + 1), size, promise.max_rate) <= 0.1)[-1])


def test_samples_break_a_promise_as_often_as_their_law_says():
    """One threshold whose rate is the smallest above the limit: the hardest case."""
    total, promise, draws = 2000, Promise(0.02, 0.9), 3000
    flipped = math.floor(promise.max_rate * total) + 1
    flips = (np.arange(total) < flipped)[:, None]
    found = resplit({"rule": flips}, promise, draws)
    half = hypergeom.cdf(most_flips(total // 2, promise), total, flipped, total // 2)
    redraw = binom.cdf(most_flips(total, promise), total, flipped / total)
    assert half == pytest.approx(0.013, abs=0.0005)
    assert 0.05 < redraw <= promise.risk
    for of, expected in ((found.halves, half), (found.redraws, redraw)):
        assert of.broken == of.certified
        assert abs(of.share - expected) < 4 * math.sqrt(expected * (1 - expected) / draws)
        assert of.low < of.share < of.high


def test_a_limit_that_is_reached_is_kept():
    flips = (np.arange(200) < 20)[:, None]
    found = resplit({"rule": flips}, Promise(0.1, 0.9), 200)
    assert found.rules["rule"].above == 0
    assert found.halves.certified > 0
    assert found.halves.broken == found.redraws.broken == 0
    # What the other half of a kept promise shows is chance: it lacks what the certificate saw.
    assert found.rules["rule"].held_out_above == found.halves.certified


def test_a_record_that_is_too_small_certifies_nothing_and_breaks_nothing():
    found = resplit({"rule": np.zeros((20, 3), bool)}, Promise(0.01, 0.9), 50)
    assert (found.halves.certified, found.redraws.certified, found.halves.broken) == (0, 0, 0)
    assert found.rules["rule"].held_out_rate is None
    with pytest.raises(InvalidArgumentError, match="1 prompts cannot be halved"):
        resplit({"rule": np.zeros((1, 3), bool)}, Promise(0.01, 0.9), 50)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_promises_are_kept_on_a_recording_of_the_bundled_pair():
    target = LocalModel(VerifySettings(model=str(bundled.TARGET)))
    draft = LocalModel(DraftSettings(model=str(bundled.DRAFT)))
    task = TASKS["word_problems"](limit=200, seed=23)
    recording = Recorder(target, draft, task, 15, 256).record(task.problems())
    flips = flips_of(candidates(RuleReplay(recording), AXES, 0.8), AXES)
    num_right = len(next(iter(flips.values())))
    tried = 0
    for name, table in flips.items():
        # The limits just below a threshold's rate are those that are easiest to break.
        for count in {int(c) for c in table.sum(axis=0) if c}:
            promise = Promise((count - 0.5) / num_right, 0.8)
            found = resplit({name: table}, promise, 200)
            for of in (found.halves, found.redraws):
                error = math.sqrt(promise.risk * (1 - promise.risk) / of.draws)
                assert of.share <= promise.risk + 4 * error, (name, promise, found)
            tried += found.redraws.certified > 0
    assert tried > 5
    together = resplit(flips, Promise(0.03, 0.9), 200)
    assert together.halves.low <= together.promise.risk
    assert together.redraws.low <= together.promise.risk
