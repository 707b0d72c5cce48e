"""The draft engine: runs the proposals of all sessions on one model. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from flyspec.engine.loop import OnStep, StepLoop
from flyspec.engine.model import Draw, Model
from flyspec.engine.scheduler import StepBudget
from flyspec.values.tokens import Drafted


class Engine(StepLoop[Drafted]):
    """Runs proposals (`draft_service.proposal`) on a model; session states own them."""

    def __init__(
        self,
        model: Model,
        prepare: Callable[[], None] = lambda: None,
        budget: StepBudget | None = None,
        on_step: OnStep = lambda *_: None,
        step_timeout_s: float = math.inf,
    ) -> None:
        super().__init__("draft", prepare, budget, on_step, step_timeout_s)
        self.model = model

    def run_batch(self, wants: Sequence[Draw]) -> Sequence[Drafted]:
        return self.model.draw(wants, self.arrival)

    def spoiled(self, slot: int) -> None:
        self.model.cache.forget(slot)

    def steps_of(self, want: Draw, result: Drafted) -> int:
        """Return one step, plus one per token drawn after those of the first step's rows."""
        return 1 + len(result.token_ids) - want.step.num_logits
