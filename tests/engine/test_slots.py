"""Which slot a sequence gets, and what it begins with."""

from __future__ import annotations

import pytest

from flyspec.engine.cache_table import Copy
from flyspec.engine.slots import MIN_REUSE, SlotTable
from flyspec.errors import ResourceExhaustedError

PROMPT = [*range(40)]
ANSWER = [*range(100, 200)]


@pytest.fixture
def slots():
    """Three free slots; the first holds a prompt and its answer."""
    table = SlotTable(3, 256)
    slot = table.acquire(PROMPT).slot
    table.record(slot, 0, [*PROMPT, *ANSWER])
    table.release(slot)
    return table


@pytest.mark.parametrize(
    ("tokens", "slot", "length", "copied"),
    [
        ([*PROMPT, *ANSWER, 7], 0, 140, 0),  # the next turn
        (PROMPT, 0, 40, 0),  # again, for another answer
        ([*PROMPT[:30], *range(300, 330)], 1, 30, 30),  # the same beginning: both are kept
        (PROMPT[: MIN_REUSE - 1], 1, 0, 0),
        ([9] * 50, 1, 0, 0),
    ],
)
def test_a_sequence_keeps_what_may_be_asked_for_again(slots, tokens, slot, length, copied):
    assert slots.acquire(tokens) == (slot, length)
    assert slots.take_moves().copies == ([Copy(0, slot, copied)] if copied else [])


def test_a_busy_slot_is_copied(slots):
    slots.acquire(PROMPT)
    slots.record(0, 0, PROMPT)
    assert slots.acquire([*PROMPT, 5]) == (1, 40)
    assert slots.take_moves().copies == [Copy(0, 1, 40)]
    slots.acquire()
    with pytest.raises(ResourceExhaustedError, match="all 3 sessions are in use"):
        slots.acquire()
