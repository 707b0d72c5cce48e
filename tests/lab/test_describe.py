"""Descriptions of texts: distinct n-grams, loops and broken endings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyspec_lab.describe import (
    broken_ending,
    describe_text,
    distinct_n,
    ends_in_loop,
    loop_token_index,
)


def test_distinct_n_of_known_sequences() -> None:
    assert distinct_n([1, 2, 3, 4], 1) == distinct_n([1, 2, 3, 4], 3) == 1
    assert distinct_n([1, 1, 1, 1], 1) == 1 / 4
    assert distinct_n([1, 2, 1, 2, 1], 2) == 2 / 4
    assert distinct_n([1, 2], 3) is None
    assert distinct_n([], 1) is None


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 4))
def test_distinct_n_counts_what_is_not_the_same_as_anything_before(
    tokens: list[int], n: int
) -> None:
    grams = [tokens[i : i + n] for i in range(len(tokens) - n + 1)]
    new = [gram for i, gram in enumerate(grams) if gram not in grams[:i]]
    assert distinct_n(tokens, n) == (len(new) / len(grams) if grams else None)


def test_loops_are_found_where_they_are_complete() -> None:
    assert loop_token_index([5] * 100) == 48
    assert loop_token_index(list(range(20)) + [1, 2, 3, 4] * 20) == 20 + 48
    assert loop_token_index(list(range(32)) * 4) == 128
    assert loop_token_index(list(range(32)) * 3) is None
    assert loop_token_index([]) is None
    looping = describe_text("a " * 60, [1] * 60)
    assert looping.loop_token_index == 48
    assert looping.distinct_1 == 1 / 60


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


@pytest.mark.parametrize(
    ("text", "ending"),
    [
        ("All is well.", None),
        ("He said: “All is well.”", None),
        ("Is it? (Yes!)", None),
        ("これは終わりです。", None),
        ("**All is well.**\n\n", None),
        ("#### 42", None),
        ("42", None),
        ("Yes", None),
        ("", None),
        ("- apples and some more pears", None),
        ("1. apples and some more pears", None),
        ("## A heading of four words", None),
        ("| a | b | c |", None),
        ("See https://example.org/a/b", None),
        ("```python\nx = 1\n```", None),
        ("```python\nx = 1\n```\nThat was it.", None),
        ("What a lovely day it is 🙂", None),
        ("She went to the", "sentence"),
        ("She went to the market, the bank and", "sentence"),
        ("She went to the market,", "sentence"),
        ("She went (", "sentence"),
        ("- one,", "sentence"),
        ("It is well-", "word"),
        ("It is caf\ufffd", "word"),
        ("```python\nx = 1", "code block"),
        ("Look:\n\n```\nx = 1\n```\n\nand\n\n```js\nlet y", "code block"),
    ],
)
def test_broken_endings(text: str, ending: str | None) -> None:
    assert broken_ending(text) == ending
