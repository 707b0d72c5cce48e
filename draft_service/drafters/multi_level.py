"""Drafts at two levels (FLy's multi-level acceleration): lookup guesses, the draft model checks.

A run found by prompt lookup goes through the draft model in one step; what the model would have
chosen itself stands, and its own next token follows. The proposal is the one that `model` makes,
in fewer steps where the text repeats itself; so are the distributions sent with it: every token of
it was drawn by the model, looked up or not.
"""

from __future__ import annotations

from collections.abc import Sequence

from draft_service.drafters.base import DrafterSession, Drafting
from draft_service.drafters.model import ModelDrafter, ModelSession, still_needed, sure
from flyspec.engine.model import Model
from flyspec.lookup import PromptLookup
from flyspec.prefix import num_same
from flyspec.values.rounds import DraftOpen
from flyspec.values.tokens import Drafted, Origin

MAX_GUESS = 16
"""Most looked-up tokens checked in one step; a longer row costs more than it saves when wrong."""


class MultiLevelDrafter(ModelDrafter):
    """Prompt lookup checked by a causal LM."""

    kind = "multi_level"

    def open(self, open_: DraftOpen) -> DrafterSession:
        """Take a slot and index the sequence."""
        return MultiLevelSession(self._model, self._eos, open_)


class MultiLevelSession(ModelSession):
    """A model's session whose sequence is in an n-gram index."""

    def __init__(self, model: Model, eos: frozenset[int], open_: DraftOpen) -> None:
        super().__init__(model, eos, open_)
        self._lookup = PromptLookup(open_.token_ids)
        self.token_ids = self._lookup.token_ids

    def move(self, keep_length: int, append_token_ids: Sequence[int]) -> None:
        """Truncate, then append; what is cached of the kept tokens stays."""
        self._lookup.truncate(keep_length)
        self._lookup.extend(append_token_ids)
        self.cached = min(self.cached, keep_length)

    def propose(
        self, max_tokens: int, min_confidence: float = 0.0, num_scored: int = 0
    ) -> Drafting:
        """One step a guessed run; one step a token where lookup has no guess."""
        if num_scored:
            yield from self.score(num_scored)
        lookup, eos, base = self._lookup, self._eos, len(self.token_ids)
        left = min(max_tokens, self._context_length - base)
        while left > 0:
            base = len(self.token_ids)
            guess = lookup.propose(min(left, MAX_GUESS))
            # The token at the proposal's end needs no step after it.
            drawn = yield from self.extend(guess[: left - 1])
            agreed = num_same(drawn.token_ids, guess[: left - 1])
            count = agreed + 1
            count = next((i + 1 for i in range(count) if drawn.token_ids[i] in eos), count)
            count = sure(min_confidence, drawn.confidences[:count], count)
            run = drawn.token_ids[:count]
            origins = [
                Origin.EXACT_LOOKUP if i < len(guess) and token == guess[i] else Origin.EXACT_MODEL
                for i, token in enumerate(run)
            ]
            lookup.extend(run)
            self.cached = min(self.cached, base + min(agreed, count))
            confidences = drawn.confidences[:count]
            yield Drafted(run, origins, drawn.distributions[:count], confidences)
            min_confidence = still_needed(min_confidence, confidences)
            left = 0 if run[-1] in eos or min_confidence > 1 else left - count
