"""Drafts that a step verifies, compared with every other choice; step times, with a fake clock."""

from itertools import accumulate, product
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyspec.engine.slots import SlotTable
from flyspec.step_costs import StepCosts
from flyspec.values.admin import MeasuredStep
from verify_service import warm_target
from verify_service.adaptive_verification import admit

EIGHTHS = st.integers(0, 8).map(lambda n: n / 8)
CHANCES = st.lists(EIGHTHS, max_size=4).map(lambda chances: sorted(chances, reverse=True))
STEPS = st.lists(st.integers(1, 20), min_size=1, max_size=4).map(
    lambda ns: StepCosts([MeasuredStep(2**i, n) for i, n in enumerate(sorted(ns))])
)
DEARER_AND_DEARER = st.lists(st.integers(0, 20), max_size=12).map(
    lambda ns: StepCosts([MeasuredStep(1, 20), *(
        MeasuredStep(i, 20 + n) for i, n in enumerate(accumulate(sorted(ns)), 2)
    )])
)  # fmt: skip
"""Costs of which each further token's is at least the last one's."""


def rate(survivals, counts, others, costs):
    """Tokens per ns."""
    expected = len(survivals) + sum(
        sum(chances[:count]) for chances, count in zip(survivals, counts, strict=True)
    )
    return expected / costs(others + sum(counts))


@given(
    survivals=st.lists(CHANCES, min_size=1, max_size=4),
    others=st.integers(1, 6),
    costs=DEARER_AND_DEARER,
)
def test_the_choice_is_the_best_there_is(survivals, others, costs):
    """`others` are the tokens that the step has anyway."""
    kept = admit(survivals, others + sum(map(len, survivals)), costs)
    assert len(kept) == len(survivals)
    assert all(0 <= n <= len(chances) for n, chances in zip(kept, survivals, strict=True))
    every = product(*(range(len(chances) + 1) for chances in survivals))
    best = max(rate(survivals, counts, others, costs) for counts in every)
    assert rate(survivals, kept, others, costs) == pytest.approx(best, rel=1e-9)


@given(survivals=st.lists(CHANCES, min_size=1, max_size=6), others=st.integers(1, 6), costs=STEPS)
def test_a_draft_left_out_is_never_likelier_than_one_that_is_checked(survivals, others, costs):
    kept = admit(survivals, others + sum(map(len, survivals)), costs)
    checked = [c for chances, n in zip(survivals, kept, strict=True) for c in chances[:n]]
    left = [c for chances, n in zip(survivals, kept, strict=True) for c in chances[n:]]
    assert min(checked, default=1.0) >= max(left, default=0.0)


@pytest.mark.parametrize("others", [[], [0.5], [1.0, 0.25]])
def test_what_follows_a_draft_has_no_say_in_it(others):
    """The second draft costs much, the following ones next to nothing."""
    costs = StepCosts([MeasuredStep(2, 100), MeasuredStep(3, 120), MeasuredStep(4, 180),
                       MeasuredStep(64, 190)])  # fmt: skip
    for num_same in (1, 2, 3):
        found = set()
        for behind in product([0.0, 0.25, 0.5, 0.625], repeat=4 - num_same):
            chances = [*[0.75, 0.75, 0.625][:num_same], *sorted(behind, reverse=True)]
            first, _ = admit([chances, others], 2 + len(chances) + len(others), costs)
            found.add(min(first, num_same))
        assert len(found) == 1


def test_where_rows_cost_nothing_all_are_checked():
    survivals = [[0.5, 0.25], [], [0.01, 0.0]]
    assert admit(survivals, 9, StepCosts()) == [2, 0, 2]
    flat = StepCosts([MeasuredStep(1, 100), MeasuredStep(64, 100)])
    assert admit(survivals, 9, flat) == [2, 0, 2]


def test_chances_that_rise_are_taken_in_order():
    """Invalid, but handled: the later draft then counts as likely as the one before it."""
    costs = StepCosts([MeasuredStep(1, 10), MeasuredStep(2, 11), MeasuredStep(9, 18)])
    assert admit([[0.05, 0.9], [0.5]], 5, costs) == [0, 1]


MS = 1_000_000


class Clocked:
    """A step takes `base_ns` and `row_ns` for each row; the first of a size ten times that."""

    def __init__(self, base_ns, row_ns, context_length=256):
        self.info = SimpleNamespace(context_length=context_length, vocab_size=300)
        self.cache = SlotTable(1, context_length)
        self.now_ns, self._base_ns, self._row_ns = 0, base_ns, row_ns
        self._seen = set()

    def cost(self, rows):
        return self._base_ns + rows * self._row_ns

    def forward(self, steps):
        (step,) = steps
        first = len(step.token_ids) not in self._seen
        self._seen.add(len(step.token_ids))
        self.now_ns += self.cost(len(step.token_ids)) * (10 if first else 1)

    def synchronize(self):
        pass


@pytest.mark.parametrize("base_ns", [MS // 4, 5 * MS, 80 * MS, 2000 * MS])
def test_quick_or_slow_a_target_tells_what_rows_cost(monkeypatch, base_ns):
    model = Clocked(base_ns, base_ns // 20)
    monkeypatch.setattr(warm_target, "perf_counter_ns", lambda: model.now_ns)
    measured = warm_target.measure_steps(model)
    costs = StepCosts(measured)
    for rows in (1, 5, 16, 32, 64):
        assert costs(rows) == pytest.approx(model.cost(rows))
    assert [m.num_tokens for m in measured] == sorted(m.num_tokens for m in measured)
    assert len(measured) == (9 if base_ns < MS else 3 if base_ns > 10 * MS else len(measured))
    assert not model.cache.num_free - 1  # the slot is free again


def test_a_short_context_is_not_measured():
    assert warm_target.measure_steps(Clocked(MS, 1, context_length=64)) == ()
