"""A whole draft model as a head: it reads tokens alone, in the target's process.

Where a target's step takes a millisecond or a few, a trip to a draft service takes as long. Beside
the target a draft model's proposal comes with the verdict, like any head's.
"""

from __future__ import annotations

from collections.abc import Sequence

from flyspec.engine.draft_heads.base import HeadStep
from flyspec.engine.model import Draw, Model, Step
from flyspec.prefix import num_same
from flyspec.speculation_length import MOST_BY_AUTO
from flyspec.values.tokens import Drafted


class ModelHead:
    """Drafts with a causal language model that has the target's vocabulary.

    A slot of the target is the model's slot of the same number, so the model needs as many, each as
    long. What it read while drafting stays in its cache, and is used if it was accepted.
    """

    kind = "model"
    hidden_layers: tuple[int, ...] = ()
    max_tokens = MOST_BY_AUTO

    def __init__(self, model: Model) -> None:
        self._model = model
        self.num_parameters = model.info.num_parameters
        self.fingerprint = model.info.weights_fingerprint

    def held(self, slot: int) -> int:
        return self._model.cache.length(slot)

    def forget(self, slot: int) -> None:
        self._model.cache.forget(slot)

    def draft(self, steps: Sequence[HeadStep]) -> list[Drafted]:
        """Like `DraftHead.draft`. Raises `ValueError` for a step beyond what a slot holds."""
        return [*self._model.draw([self._draw(step) for step in steps])]

    def _draw(self, step: HeadStep) -> Draw:
        slot, start, drafts = step.slot, step.start, step.max_tokens > 0
        cached = self._model.cache.length(slot)
        if start > cached:
            raise ValueError(f"a step from position {start}, but slot {slot} holds {cached} tokens")
        # The target's padded output layer may have ids that stand for no text.
        most = self._model.info.vocab_size - 1
        known = [min(token, most) for token in (step.first_token_id, *step.token_ids)]
        if not drafts:
            known.pop()  # it is read when something follows it
        same = num_same(known[:-1], self._model.cache.held(slot, start))
        rest = Step(slot, start + same, known[same:], int(drafts))
        if not drafts:
            return Draw(rest)
        return Draw(
            rest, step.sampling, step.seed, step.history, step.distribution, step.max_tokens,
            step.stop_token_ids, step.min_confidence, confidences=True,
        )  # fmt: skip
