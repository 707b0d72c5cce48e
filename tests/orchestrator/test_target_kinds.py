"""Determining which of two models most replicas run."""

from __future__ import annotations

import pytest

from flyspec.values.admin import ModelInfo
from orchestrator.fleet import target
from orchestrator.fleet.target import Kinds, difference

OLD = ModelInfo("old", "t", 400, 256, num_parameters=7, weights_fingerprint="aa", numerics="x")
NEW = ModelInfo("new", "t", 400, 256, num_parameters=7, weights_fingerprint="bb", numerics="x")
FLOAT = ModelInfo("old", "t", 400, 256, num_parameters=7, weights_fingerprint="aa", numerics="y")


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(target.time, "monotonic", lambda: now[0])
    return now


def counts(kinds, expected=()):
    return kinds.count(OLD, expected), kinds.count(NEW, expected)


def test_a_replica_counts_as_what_it_said_last(clock):
    kinds = Kinds(allow_mixed_numerics=False)
    for address in ("a", "b"):
        kinds.note(address, OLD)
    kinds.note("c", NEW)
    assert counts(kinds) == (2, 1)
    kinds.note("a", NEW)
    assert counts(kinds) == (1, 2)


def test_one_that_is_silent_counts_for_a_while_and_longer_where_it_is_expected(clock):
    kinds = Kinds(allow_mixed_numerics=False)
    kinds.note("a", OLD)
    kinds.note("b", OLD)
    clock[0] += target.REMEMBERED_S + 1
    kinds.note("c", NEW)
    assert counts(kinds) == (0, 1)
    assert counts(kinds, {"a", "c"}) == (1, 1)
    clock[0] += target.EXPECTED_S
    assert counts(kinds, {"a", "c"}) == (0, 0)


@pytest.mark.parametrize(("mixed", "expected"), [(False, (1, 0)), (True, (2, 0))])
def test_numerics_make_another_kind_unless_they_may_differ(clock, mixed, expected):
    kinds = Kinds(mixed)
    kinds.note("a", OLD)
    kinds.note("b", FLOAT)
    assert counts(kinds) == expected
    assert bool(difference(OLD, FLOAT, mixed)) == (not mixed)
