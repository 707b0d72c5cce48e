"""Loops of texts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flyspec_lab.samples import ends_in_loop, loop_token_index


def test_loops_are_found_where_they_are_complete() -> None:
    assert loop_token_index([5] * 100) == 48
    assert loop_token_index(list(range(20)) + [1, 2, 3, 4] * 20) == 20 + 48
    assert loop_token_index(list(range(32)) * 4) == 128
    assert loop_token_index(list(range(32)) * 3) is None
    assert loop_token_index([]) is None


@given(
    st.lists(st.integers(0, 2), max_size=4), st.lists(st.integers(0, 2), min_size=1, max_size=32),
    st.integers(0, 150), st.integers(0, 1),
)  # fmt: skip
def test_a_text_ends_in_a_loop_if_the_guard_would_find_one_at_its_last_token(
    before: list[int], unit: list[int], length: int, after: int
) -> None:
    tokens = before + (unit * 150)[:length] + [9] * after
    # The guard begins anew where a suffix begins; the shortest that loops is found at its end.
    found = any(loop_token_index(tokens[i:]) == len(tokens) - i for i in range(len(tokens)))
    assert ends_in_loop(tokens) == found


def test_what_leaves_its_loop_does_not_end_in_it() -> None:
    assert ends_in_loop([5] * 48)
    assert ends_in_loop([7, 8, *[1, 2, 3] * 16])
    assert not ends_in_loop([5] * 47)
    assert not ends_in_loop([*[5] * 100, 6])
    assert not ends_in_loop([])
