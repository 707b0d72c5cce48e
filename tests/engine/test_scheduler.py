"""The work that runs in a step: nothing is lost, nothing waits forever, and limits hold."""

from hypothesis import given
from hypothesis import strategies as st

from flyspec.engine.model import Step
from flyspec.engine.scheduler import Pieces, StepBudget, allot


def pieces(length, rows=1):
    return Pieces(Step(0, 0, list(range(length)), rows))


@st.composite
def works(draw):
    lengths = draw(st.lists(st.integers(1, 900), min_size=1, max_size=12))
    return [pieces(length, draw(st.integers(0, min(length, 70)))) for length in lengths]


budgets = st.builds(StepBudget, st.integers(128, 2048), st.integers(16, 600))


@given(works(), budgets)
def test_all_work_is_done_in_order_and_once(work, budget):
    taken = {id(w): [] for w in work}
    rows = {id(w): [] for w in work}
    waiting, steps = list(work), 0
    while waiting:
        counts = allot(waiting, budget)
        assert sum(counts) > 0, "every step gets something done"
        for item, count in zip(waiting, counts, strict=True):
            if count:
                step = item.take(count)
                assert step.start == len(taken[id(item)])
                taken[id(item)] += step.token_ids
                rows[id(item)].append(step.num_logits)
        waiting = [item for item in waiting if item.remaining]
        steps += 1
        assert steps < 2000
    for item in work:
        assert taken[id(item)] == list(range(len(taken[id(item)])))
        assert all(r == 0 for r in rows[id(item)][:-1])
        assert rows[id(item)][-1] == item.wanted


@given(works(), budgets)
def test_limits_hold(work, budget):
    remaining = [item.remaining for item in work]
    counts = allot(work, budget)
    long = [i for i, n in enumerate(remaining) if n > budget.short]
    uncut = [i for i in long if work[i].wanted == remaining[i]]
    if not uncut:
        assert sum(counts[i] for i in long) <= budget.prefill_chunk
        first = counts[0] if 0 not in long else 0
        assert sum(counts) <= max(budget.max_tokens, first + budget.reserved)
    for i, (count, n) in enumerate(zip(counts, remaining, strict=True)):
        assert i in long or count in (0, n), "short work is not cut"


def test_a_prompt_costs_running_sessions_one_chunk_a_step():
    prompt, rounds = pieces(1500), [pieces(17, 17) for _ in range(32)]
    counts = allot([prompt, *rounds], StepBudget(2048, 256))
    assert counts == [256] + [17] * 32


def test_under_overload_a_prompt_still_moves():
    rounds = [pieces(17, 17) for _ in range(200)]
    counts = allot([*rounds, pieces(1500)], StepBudget(1024, 512))
    assert counts[-1] >= 256
    assert sum(counts) <= 1024


def test_rounds_longer_than_a_chunk_do_not_wait_for_prompts():
    rounds = [pieces(40, 40) for _ in range(4)]
    assert allot([pieces(1500), *rounds], StepBudget(256, 16)) == [16, 40, 40, 40, 40]
    assert allot([*rounds, pieces(1500)], StepBudget(128, 16)) == [40, 40, 0, 0, 16]


def test_rows_that_nothing_precedes_run_whole():
    assert allot([pieces(900, 900)], StepBudget(128, 16)) == [900]
