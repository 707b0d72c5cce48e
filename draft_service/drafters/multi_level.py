"""Drafts at two levels (FLy's multi-level acceleration): lookup guesses, the draft model checks.

A run found by prompt lookup goes through the draft model in one step; tokens that the model would
have chosen itself are accepted, and its own next token follows. The proposal and its distributions
are those of the drafter `model`, in fewer steps where the text repeats itself: the model draws
every token, looked up or not.
"""

from __future__ import annotations

from collections.abc import Sequence

from draft_service.drafters.base import Drafting, sure
from draft_service.drafters.model import ModelDrafter, ModelSession
from flyspec.engine.model import Model
from flyspec.lookup import PromptLookup
from flyspec.prefix import num_same
from flyspec.values.rounds import DraftOpen
from flyspec.values.tokens import Drafted, Origin, still_needed

MAX_GUESS = 16
"""Maximum looked-up tokens checked per step; wrong guesses make longer runs a net loss."""


class MultiLevelDrafter(ModelDrafter):
    """Prompt lookup checked by a causal LM."""

    kind = "multi_level"

    def open(self, open_: DraftOpen) -> MultiLevelSession:
        return MultiLevelSession(self._model, self._eos, open_)


class MultiLevelSession(ModelSession):
    """A model session with an n-gram index of its sequence."""

    def __init__(self, model: Model, eos: frozenset[int], open_: DraftOpen) -> None:
        super().__init__(model, eos, open_)
        self._lookup = PromptLookup(open_.token_ids)
        self.token_ids = self._lookup.token_ids

    def move(self, keep_length: int, append_token_ids: Sequence[int]) -> None:
        self._lookup.truncate(keep_length)
        self._lookup.extend(append_token_ids)
        self.cached = min(self.cached, keep_length)

    def propose(
        self, max_tokens: int, min_confidence: float = 0.0, num_scored: int = 0
    ) -> Drafting:
        """Propose in one step per guessed run, or per token where lookup has no guess."""
        if num_scored:
            yield from self.score(num_scored)
        lookup, eos, base = self._lookup, self._eos, len(self.token_ids)
        left = min(max_tokens, self._context_length - base)
        while left > 0:
            base = len(self.token_ids)
            guess = lookup.propose(min(left, MAX_GUESS))
            # The proposal's last token needs no step after it.
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
