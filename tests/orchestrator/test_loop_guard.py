"""The loop guard against its definition, and against texts that only look like loops."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import given
from hypothesis import strategies as st

from flyspec.values.tokens import Origin
from orchestrator.generation.loop_guard import MAX_UNIT_TOKENS, MIN_REPEATS, MIN_TOKENS, LoopGuard
from tests.orchestrator.fakes import Fakes, plan_of
from tests.orchestrator.tokenizer import TOKENIZER
from tests.orchestrator.world import World


def index_of(token_ids):
    guard = LoopGuard()
    for token_id in token_ids:
        guard.push(token_id)
    assert guard.num_tokens == len(token_ids)
    return guard.token_index


def by_definition(token_ids):
    """The shortest beginning that ends in a unit repeated often enough, each unit spelled out."""
    for end in range(len(token_ids) + 1):
        for unit in range(1, MAX_UNIT_TOKENS + 1):
            covered = max(MIN_TOKENS, MIN_REPEATS * unit)
            tail = token_ids[max(0, end - covered) : end]
            cycle = (tail[:unit] * covered)[:covered]
            if len(tail) == covered and tail == cycle:
                return end
    return None


parts = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 60)), max_size=4
).map(lambda parts: [token for unit, times in parts for token in unit * times][:250])


@given(parts)
def test_agrees_with_the_definition(token_ids):
    assert index_of(token_ids) == by_definition(token_ids)


def test_indentation_digits_and_numbered_lists_are_no_loops():
    indented = [([5] * 16 + [100 + i, 200 + i, 6]) for i in range(40)]
    assert index_of([t for line in indented for t in line]) is None
    assert index_of([9] * 30) is None
    numbered = [[3, 50 + i, 4, 8, 8, 9] for i in range(40)]
    assert index_of([t for item in numbered for t in item]) is None


class Steady(World):
    """The target always says 3; so does the drafter, but with 4 at the positions in `wrong`."""

    wrong: ClassVar[set[int]] = set()

    def own(self, prefix):
        return 3

    def guess(self, prefix):
        return 4 if len(prefix) in self.wrong else 3

    def passes(self, prefix, token):
        return True


async def run(world, window_size, k):
    plan = plan_of(max_tokens=90, num_speculative_tokens=k, loop_guard=True, max_plain_tokens=1)
    fakes = Fakes(world, plan, TOKENIZER, window_size)
    final = [token async for _, update in fakes.run() for token in update.final]
    return final, fakes.progress.loop_guard_index(len(final))


async def test_the_rest_is_exact_and_an_open_window_runs_its_course():
    """Rounds of nine: the cycle is complete in the sixth, which also opens a window."""

    class Two(Steady):
        wrong: ClassVar[set[int]] = {3 + 52, 3 + 60, 3 + 61, 3 + 70}

    final, index = await run(Two(), window_size=4, k=8)
    assert index == 54
    assert [i for i, t in enumerate(final) if t.origin is Origin.LOOSE] == [52]
    assert final[60].origin is Origin.CORRECTION


async def test_after_a_failed_window_the_rest_is_exact_from_its_position():
    class Two(Steady):
        wrong: ClassVar[set[int]] = {3 + 51, 3 + 54}

    final, index = await run(Two(), window_size=4, k=8)
    assert index == 51
    assert not [t for t in final if t.origin is Origin.LOOSE]
    assert final[51].origin is Origin.CORRECTION


async def test_a_cycle_beyond_the_end_of_the_output_is_not_told():
    plan = plan_of(max_tokens=40, num_speculative_tokens=60, loop_guard=True)
    fakes = Fakes(Steady(), plan, TOKENIZER)
    async for _ in fakes.run():
        pass
    assert fakes.output.num_final_tokens == 40
    assert fakes.progress.loop_guard_index(40) is None
