"""Measuring the target's step times at startup, with a fake clock."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flyspec.engine.slots import SlotTable
from flyspec.step_costs import StepCosts
from verify_service import step_trial

MS = 1_000_000


class Clocked:
    """A step takes `base_ns` and `row_ns` for each row; the first of a size ten times that."""

    def __init__(self, base_ns: int, row_ns: int, context_length: int = 256) -> None:
        self.info = SimpleNamespace(context_length=context_length, vocab_size=300)
        self.cache = SlotTable(1, context_length)
        self.now_ns, self._base_ns, self._row_ns = 0, base_ns, row_ns
        self._seen: set[int] = set()

    def cost(self, rows: int) -> int:
        return self._base_ns + rows * self._row_ns

    def forward(self, steps) -> None:
        (step,) = steps
        first = len(step.token_ids) not in self._seen
        self._seen.add(len(step.token_ids))
        self.now_ns += self.cost(len(step.token_ids)) * (10 if first else 1)

    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize("base_ns", [MS // 4, 5 * MS, 80 * MS, 2000 * MS])
def test_quick_or_slow_a_target_tells_what_rows_cost(monkeypatch, base_ns) -> None:
    model = Clocked(base_ns, base_ns // 20)
    monkeypatch.setattr(step_trial, "perf_counter_ns", lambda: model.now_ns)
    measured = step_trial.measure_steps(model)
    costs = StepCosts(measured)
    for rows in (1, 5, 16, 32, 64):
        assert costs(rows) == pytest.approx(model.cost(rows))
    assert [m.num_tokens for m in measured] == sorted(m.num_tokens for m in measured)
    assert len(measured) == (9 if base_ns < MS else 3 if base_ns > 10 * MS else len(measured))
    assert not model.cache.num_free - 1  # the slot is free again


def test_a_short_context_is_not_measured() -> None:
    assert step_trial.measure_steps(Clocked(MS, 1, context_length=64)) == ()
