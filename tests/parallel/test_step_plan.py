"""A step plan survives the round trip, whatever its length; a truncated one is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flyspec.engine.cache_table import BlockChange, Copy, Moves
from flyspec.engine.model import Step
from flyspec.engine.step_plan import HEADER, Kind, decode, encode

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
    plan = encode(Moves([Copy(1, 2, 3)]), [Step(0, 5, range(4), 2)])  # type: ignore[arg-type]
    assert decode(plan).steps == [Step(0, 5, [0, 1, 2, 3], 2)]
