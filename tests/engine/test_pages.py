"""The page table, driven at random: what a slot holds is always in memory, whatever was shared."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from flyspec.engine.cache_table import Claim, Copy
from flyspec.engine.pages import PageTable
from flyspec.errors import ResourceExhaustedError
from tests.examples import examples

SLOTS, LENGTH, SIZE = 4, 22, 4  # a context ends within a block
WIDTH = 6


class Memory:
    """Keys and values by row: each is the whole sequence that it was computed from."""

    def __init__(self, num_blocks):
        self.rows = [()] * ((num_blocks + 1) * SIZE)

    def copy(self, copies):
        for source, target, length in copies:
            for i in range(length):
                self.rows[target * SIZE + i] = self.rows[source * SIZE + i]


class Running:
    """A client's sequence, of which the first `cached` tokens are in the cache.

    The slot's first `valid` are: more, where the client rolled back and has not run since.
    """

    def __init__(self, slot, tokens, length):
        self.slot, self.tokens = slot, tokens
        self.cached = self.valid = length

    def lose(self, end):
        self.cached, self.valid = min(self.cached, end), min(self.valid, end)


class Pages(RuleBasedStateMachine):
    """Sequences open, run, roll back, fail, make room and go."""

    @initialize(num_blocks=st.integers(WIDTH, 3 * WIDTH))
    def begin(self, num_blocks):
        self.table = PageTable(SLOTS, LENGTH, num_blocks, SIZE)
        self.mirror = PageTable(SLOTS, LENGTH, num_blocks, SIZE)
        self.memory = Memory(num_blocks)
        self.open = []  # in order of age

    @precondition(lambda self: len(self.open) < SLOTS)
    @rule(
        family=st.sampled_from([1, 1, 2]),
        shared=st.sampled_from([16, 8, 22, 9, 5, 0]),
        own=st.lists(st.integers(1, 2), max_size=LENGTH),
        runs=st.booleans(),
    )
    def open_sequence(self, family, shared, own, runs):
        """Sequences begin alike; many run whole at once."""
        tokens = [*[family] * shared, *own][:LENGTH] or [family]
        slot, length = self.table.acquire(tokens)
        assert slot not in [running.slot for running in self.open]
        assert length % SIZE == 0
        assert length <= len(tokens)
        running = Running(slot, tokens, length)
        self.open.append(running)
        if runs:
            start = min(length, len(tokens) - 1)
            self.run_claims([running], [Claim(slot, start, len(tokens) - start)])

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def release(self, data):
        running = data.draw(st.sampled_from(self.open))
        self.open.remove(running)
        self.table.release(running.slot)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def roll_back(self, data):
        """The table is not told."""
        running = data.draw(st.sampled_from(self.open))
        del running.tokens[data.draw(st.integers(1, len(running.tokens))) :]
        running.cached = min(running.cached, len(running.tokens))

    @precondition(lambda self: any(running.cached for running in self.open))
    @rule(data=st.data())
    def go_elsewhere(self, data):
        """Roll back and continue with other tokens than before, which others may share."""
        running = data.draw(st.sampled_from([r for r in self.open if r.cached]))
        start = data.draw(st.integers(0, running.cached - 1))
        running.cached = start
        running.tokens[start:] = [3] * data.draw(st.integers(1, LENGTH - start))
        claim = Claim(running.slot, start, len(running.tokens) - start)
        self.run_claims([running], [claim])

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def step(self, data):
        """Some sequences ask for room; those that get it run, the others keep what they have."""
        chosen = data.draw(st.permutations(self.open))
        chosen = chosen[: data.draw(st.integers(1, len(chosen)))]
        self.run_claims(chosen, [self.claim(running, data) for running in chosen])

    def run_claims(self, chosen, claims):
        ages = {running.slot: age for age, running in enumerate(self.open)}
        before = {running.slot: self.table.length(running.slot) for running in self.open}
        answers = self.table.make_room(claims)
        oldest = min(claims, key=lambda claim: ages[claim.slot])
        assert answers[claims.index(oldest)]
        granted = {claim.slot for claim, answer in zip(claims, answers, strict=True) if answer}
        for running in self.open:
            if before[running.slot] and running.slot not in granted:
                lost = self.table.length(running.slot) == 0
                claimed = running.slot in [claim.slot for claim in claims]
                if lost:
                    assert not claimed or ages[running.slot] > ages[oldest.slot]
                    running.lose(0)
                else:
                    assert self.table.length(running.slot) == before[running.slot]
        self.write([(r, c) for r, c in zip(chosen, claims, strict=True) if c.slot in granted])

    @precondition(lambda self: self.open)
    @rule(data=st.data(), forgets=st.booleans())
    def fail(self, data, forgets):
        """A step is prepared without asking for room, and does not run."""
        running = data.draw(st.sampled_from(self.open))
        claim = self.claim(running, data)
        running.lose(claim.start)
        try:
            self.table.reserve(*claim)
        except ResourceExhaustedError:
            assert not self.table.num_free_blocks
        if forgets:
            self.table.forget(running.slot)
            running.lose(0)

    @precondition(lambda self: len(self.open) == SLOTS)
    @rule()
    def forget_all(self):
        self.table.forget()
        for running in self.open:
            running.lose(0)
        assert self.table.num_free_blocks == self.table.num_blocks

    def claim(self, running, data):
        """Continue with what is not cached, or with new tokens, from any valid position."""
        tokens, end = running.tokens, running.cached
        start = data.draw(st.just(end) | st.just(max(0, end - 1)) | st.integers(0, end))
        if start == LENGTH:
            start -= 1
        if start == len(tokens):
            tokens += data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=LENGTH - start))
        rest = len(tokens) - start
        return Claim(running.slot, start, data.draw(st.just(rest) | st.integers(1, rest)))

    def write(self, steps):
        for _, claim in steps:
            self.table.reserve(*claim)
        moves = self.table.take_moves()
        self.memory.copy(moves.copies)
        self.mirror.apply_changes(moves.changes)
        assert not self.table.take_moves().changes
        for running, (slot, start, count) in steps:
            rows = self.mirror.rows(slot, start, count)
            assert rows.dtype == np.int64
            for position, row in enumerate(rows, start):
                assert row >= SIZE
                self.memory.rows[row] = tuple(running.tokens[: position + 1])
        for running, (slot, start, count) in steps:
            running.cached = running.valid = start + count
            self.table.record(slot, start, running.tokens[start : start + count])

    @invariant()
    def slots_hold_what_they_say(self):
        if not hasattr(self, "table"):
            return
        memory = Memory(0)
        memory.rows = [*self.memory.rows]
        memory.copy(self.table.pending_copies)
        for running in self.open:
            slot = running.slot
            assert self.table.length(slot) == running.valid
            held = self.table.held(slot)
            assert held[: running.cached] == running.tokens[: running.cached]
            rows = self.table.rows(slot, 0, len(held))
            assert [memory.rows[row] for row in rows] == [
                tuple(held[: end + 1]) for end in range(len(held))
            ]

    @invariant()
    def blocks_are_counted(self):
        if not hasattr(self, "table"):
            return
        table = self.table
        assert table.num_free == SLOTS - len(self.open)
        counts = Counter(table.blocks[table.blocks > 0].tolist())
        for block in range(1, table.num_blocks + 1):
            assert table._pool._references[block] == counts[block]
        assert table.num_free_blocks == table.num_blocks - len(counts)
        for row in table._rows:
            assert table._num_blocks(row.length) <= len(row.blocks)

    def teardown(self):
        if hasattr(self, "table"):
            self.mirror.apply_changes(self.table.take_moves().changes)
            assert (self.mirror.blocks == self.table.blocks).all()


def test_any_history_keeps_what_slots_hold():
    run_state_machine_as_test(
        Pages,
        settings=settings(
            max_examples=examples(40),
            stateful_step_count=40,
            suppress_health_check=list(HealthCheck),
        ),
    )


def fill(table, tokens):
    """Acquire a slot and run all of `tokens`; return it."""
    slot, length = table.acquire(tokens)
    table.reserve(slot, length, len(tokens) - length)
    table.record(slot, length, tokens[length:])
    return slot


def text(seed, count):
    return [100 * seed + i for i in range(count)]


def test_full_blocks_are_found_while_they_run_and_after():
    table = PageTable(4, 80, 20, 4)
    first = fill(table, text(1, 10))
    assert table.acquire([*text(1, 9), 5]) == (1, 8)
    assert table.blocks[first, :2].tolist() == table.blocks[1, :2].tolist()
    assert table.num_free_blocks == 20 - 3
    # Equal tokens after others are another content.
    assert table.acquire([*text(2, 4), *text(1, 8)[4:]]).length == 0
    table.release(first)
    table.release(1)
    assert table.num_free_blocks == 20
    assert table.acquire(text(1, 30)).length == 8
    assert (table.queries, table.hits) == (10 + 10 + 8 + 30, 16)
    table.reuse = False
    assert table.acquire(text(1, 30)).length == 0


def test_the_least_recently_used_are_needed_first_and_of_one_the_last():
    table = PageTable(4, 16, 8, 4)
    for seed in (1, 2):
        table.release(fill(table, text(seed, 16)))
    slot = fill(table, text(3, 8))
    table.release(slot)
    assert table.acquire(text(1, 16)).length == 8
    assert table.acquire(text(2, 16)).length == 16


def test_a_prompt_that_is_found_whole_copies_its_last_block_to_run_its_last_token():
    table = PageTable(2, 16, 8, 4)
    first = fill(table, text(1, 8))
    slot, length = table.acquire(text(1, 8))
    assert length == 8
    shared = int(table.blocks[slot, 1])
    table.reserve(slot, 7, 1)
    own = int(table.blocks[slot, 1])
    assert table.take_moves().copies == [Copy(shared, own, 3)]
    assert table.blocks[first, 1] == shared
    # A block of which nothing is kept needs no copy; its own is not copied either.
    table.reserve(slot, 0, 8)
    table.reserve(first, 0, 8)
    assert not table.take_moves().copies


def test_what_follows_a_block_that_is_written_again_alike_is_still_found():
    table = PageTable(2, 16, 8, 4)
    table.release(fill(table, text(1, 16)))
    slot = table.acquire(text(1, 8)).slot
    table.reserve(slot, 7, 1)
    assert table.acquire(text(1, 16)).length == 4
    table.record(slot, 7, text(1, 8)[7:])
    table.release(1)
    assert table.acquire(text(1, 16)).length == 16


def test_the_youngest_makes_room_and_learns_that_it_must_wait():
    table = PageTable(3, 16, 6, 4)
    first, second, third = (fill(table, text(seed, 8)) for seed in (1, 2, 3))
    claims = [Claim(third, 8, 1), Claim(first, 8, 2), Claim(second, 8, 1)]
    assert table.make_room(claims) == [False, True, True]
    assert [table.length(slot) for slot in (first, second, third)] == [8, 8, 0]
    assert table.preemptions == 1
    table.record(first, 8, [7, 7])
    table.record(second, 8, [7])
    # Nobody makes room for a younger one...
    assert table.make_room([Claim(third, 0, 8), Claim(second, 9, 1)]) == [False, True]
    assert table.preemptions == 1
    # ...but for the oldest that runs, those that do not.
    assert table.make_room([Claim(third, 0, 8)]) == [True]
    assert [table.length(slot) for slot in (first, second, third)] == [10, 0, 0]


def test_nobody_loses_anything_for_a_claim_that_must_wait_even_so():
    table = PageTable(3, 20, 6, 4)
    first, second, third = (fill(table, text(seed, 8)) for seed in (1, 2, 3))
    claims = [Claim(first, 7, 1), Claim(second, 8, 12), Claim(third, 7, 1)]
    assert table.make_room(claims) == [True, False, True]
    assert table.preemptions == 0


def test_blocks_beyond_a_sequence_go_before_sequences():
    table = PageTable(2, 16, 6, 4)
    first, second = fill(table, text(1, 16)), fill(table, text(2, 8))
    table.reserve(first, 4, 1)
    table.record(first, 4, [9])
    assert table.num_free_blocks == 0
    assert table.make_room([Claim(second, 8, 8)]) == [True]
    assert table.preemptions == 0
    assert (table.length(first), table.length(second)) == (5, 8)
    assert len(set(table.blocks[table.blocks > 0].tolist())) == 6


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="5 blocks of 4 tokens: the context of 22 needs 6"):
        PageTable(1, 22, 5, 4)
    table = PageTable(1, 22, 6, 4)
    slot = fill(table, text(1, 22))
    with pytest.raises(ValueError, match="2 tokens after the first 21 exceed a slot of 22"):
        table.reserve(slot, 21, 2)
    # Its step fails, and nothing else does.
    assert table.make_room([Claim(slot, 21, 9), Claim(slot, 40, 9)]) == [True, True]
    with pytest.raises(ResourceExhaustedError, match="--max-sessions"):
        table.acquire()


def test_without_a_free_block_a_step_is_refused():
    table = PageTable(2, 8, 2, 4)
    fill(table, text(1, 8))
    slot = table.acquire().slot
    with pytest.raises(ResourceExhaustedError, match=r"2 blocks.*--kv-cache-memory-bytes"):
        table.reserve(slot, 0, 1)


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 2), (4, 2), (5, 3), (22, 6)])
def test_a_sequence_opens_with_its_blocks_and_one_more(tokens, blocks):
    assert PageTable(1, 22, 6, 4).blocks_to_open(tokens) == blocks
