"""Messages of ranks to each other: reports, step plans, and the weights that they hold."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flyspec.config import VerifySettings
from flyspec.engine.cache_table import BlockChange, Copy, Moves
from flyspec.engine.model import Step
from flyspec.engine.parallel import HEADER, Kind, Place, RankGroup, decode, encode
from flyspec.errors import ConfigError
from verify_service import ranks
from verify_service.ranks import Report, Vigil


def vigil(ranks=(1, 2)):
    return Vigil(ranks, heartbeat_timeout_s=4.0, step_timeout_s=10.0)


def test_reports_travel_as_text():
    for report in (Report(0, 0), Report(12, 2**40)):
        assert Report.decode(report.encode().encode()) == report


def test_silence():
    watch = vigil()
    assert watch.observe(1.0, {1: Report(1, 0), 2: Report(1, 0)}) is None
    for beat in range(2, 6):
        reports = {1: Report(beat, 0), 2: Report(1, 0)}
        assert watch.observe(1.0, reports) is None
    assert watch.observe(1.0, reports) == "rank 2 has been silent for 5.0 s"
    assert vigil([0]).observe(5.0, {}) == "rank 0 has been silent for 5.0 s"


def test_a_rank_that_reports_again_is_not_lost():
    watch = vigil([1])
    for beat in range(1, 50):
        assert watch.observe(3.0, {1: Report(beat, 0)}) is None
        assert watch.observe(3.0, {1: Report(beat, 0)}) is None


def test_a_step_that_nobody_finishes():
    watch = vigil([1])
    for beat in range(1, 11):
        assert watch.observe(1.0, {1: Report(beat, 7)}, sent=8) is None
    assert watch.observe(2.0, {1: Report(99, 7)}, sent=9) == (
        "rank 1 has not finished a step for 11.0 s"
    )


def test_idle_and_progress_are_not_stuck():
    watch = vigil([1])
    for beat in range(40):
        assert watch.observe(1.0, {1: Report(beat, 7)}, sent=7) is None
    for beat in range(40, 80):
        assert watch.observe(5.0, {1: Report(beat, beat)}, sent=100) is None


MOST = torch.iinfo(torch.int64).max


class Group(RankGroup):
    """A rank among others that call `all_equal` with these numbers at the same time."""

    def __init__(self, others):
        self._others, self._calls = others, 0

    def least(self, number):
        self._calls += 1
        sign = 1 if self._calls == 1 else -1
        return min([number, *(MOST if other is None else sign * other for other in self._others)])


@pytest.mark.parametrize(
    ("own", "others", "equal"),
    [
        (5, [5, 5], True),
        (5, [None, 5, None], True),
        (None, [None, 5, 5], True),
        (None, [None], True),
        (5, [6], False),
        (None, [5, 6], False),
        (16**15 - 1, [16**15 - 2], False),
        (0, [0, None], True),
    ],
)
def test_all_ranks_see_the_same(own, others, equal):
    assert Group(others).all_equal(own) == equal
    for index, other in enumerate(others):
        rest = [own, *others[:index], *others[index + 1 :]]
        assert Group(rest).all_equal(other) == equal


def test_a_host_with_other_weights_does_not_start(monkeypatch):
    info = SimpleNamespace(weights_fingerprint=f"{5:032x}"[::-1])
    loaded = SimpleNamespace(info=info)
    monkeypatch.setattr(ranks, "load_model", lambda *_: loaded)
    group = Group([6])
    group.place, group.device = Place(0, 2, 0, 1, "elsewhere", 0), torch.device("cpu")
    with pytest.raises(ConfigError, match=r"--model here: the ranks' hosts have different weights"):
        ranks.load(VerifySettings(model="here"), group)


numbers = st.integers(0, 2**40)
moves = st.builds(
    Moves,
    st.lists(st.builds(Copy, numbers, numbers, numbers), max_size=5),
    st.lists(st.builds(BlockChange, numbers, numbers, numbers), max_size=5),
)
steps = st.lists(
    # Hidden layers do not travel: no rank but the first gives rows. Nor do trees: ranks take none.
    st.builds(
        Step,
        numbers,
        numbers,
        st.lists(numbers, min_size=1, max_size=300),
        numbers,
        st.just(()),
        st.none(),
        st.just(()),
    ),
    max_size=8,
)


@given(moves, steps, st.integers(0, 40))
def test_round_trip_and_what_stands_behind_is_ignored(moves, steps, behind):
    plan = encode(moves, steps)
    assert plan.dtype == torch.int64
    assert len(plan) == int(plan[0])
    longer = torch.cat([plan, torch.full((behind,), -7)])
    for sent in (plan, longer):
        assert decode(sent) == (Kind.STEP, moves, steps)


@pytest.mark.parametrize("kind", [Kind.IDLE, Kind.STOP])
def test_a_plan_without_a_step(kind):
    plan = encode(Moves(), (), kind)
    assert len(plan) == HEADER
    assert decode(plan) == (kind, Moves([], []), [])


@given(moves, steps.filter(bool), st.data())
def test_a_plan_that_was_cut_is_refused(moves, steps, data):
    plan = encode(moves, steps)
    cut = data.draw(st.integers(HEADER, len(plan) - 1))
    with pytest.raises(ValueError, match="invalid step plan"):
        decode(plan[:cut])


def test_token_ids_of_any_sequence():
    plan = encode(Moves([Copy(1, 2, 3)]), [Step(0, 5, range(4), 2)])
    assert decode(plan).steps == [Step(0, 5, [0, 1, 2, 3], 2)]
