"""The draft engine: runs the proposals of all sessions on one model. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from flyspec.engine.loop import StepLoop
from flyspec.engine.model import Draw
from flyspec.values.tokens import Drafted


class Engine(StepLoop[Drafted]):
    """Runs proposals (`draft_service.proposal`) on a model; session states own them."""

    service = "draft"

    def run_batch(self, wants: Sequence[Draw]) -> Sequence[Drafted]:
        return self.model.draw(wants, self.arrival)

    def steps_of(self, want: Draw, result: Drafted) -> int:
        """Return one step, plus one per token drawn after those of the first step's rows."""
        return 1 + len(result.token_ids) - want.step.num_logits
