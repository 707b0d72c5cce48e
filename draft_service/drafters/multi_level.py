"""Drafts at two levels (FLy's multi-level acceleration): lookup guesses, the draft model checks.

A run found by prompt lookup goes through the draft model in one step; what the model would have
chosen itself stands, and its own next token follows. The proposal is the one that `model` makes,
in fewer steps where the text repeats itself; so are the distributions sent with it: every token of
it was drawn by the model, looked up or not.
"""

from __future__ import annotations

from collections.abc import Sequence

from draft_service.drafters.base import DrafterSession, Drafting
from draft_service.drafters.model import CachedPrefix, ModelDrafter
from flyspec.engine.model import Model
from flyspec.lookup import PromptLookup
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


class MultiLevelSession:
    """A sequence, its n-gram index and the slot that caches it."""

    def __init__(self, model: Model, eos: frozenset[int], open_: DraftOpen) -> None:
        self._lookup = PromptLookup(open_.token_ids)
        self._prefix = CachedPrefix(model, open_, eos)
        self._context_length = model.info.context_length
        self._eos = eos

    @property
    def token_ids(self) -> Sequence[int]:
        """The sequence with the last proposal."""
        return self._lookup.token_ids

    def move(self, keep_length: int, append_token_ids: Sequence[int]) -> None:
        """Truncate, then append; what is cached of the kept tokens stays."""
        self._lookup.truncate(keep_length)
        self._lookup.extend(append_token_ids)
        self._prefix.keep(keep_length)

    def propose(self, max_tokens: int) -> Drafting:
        """One step a guessed run; one step a token where lookup has no guess."""
        lookup, prefix, tokens = self._lookup, self._prefix, self._lookup.token_ids
        left = min(max_tokens, self._context_length - len(tokens))
        while left > 0:
            base = len(tokens)
            guess = lookup.propose(min(left, MAX_GUESS))
            # The token at the proposal's end needs no step after it.
            fed = guess[: left - 1]
            drawn = yield from prefix.extend(tokens, fed)
            chosen = drawn.token_ids
            agreed = 0
            while agreed < len(fed) and chosen[agreed] == guess[agreed]:
                agreed += 1
            run = chosen[: agreed + 1]
            ended = next((i for i, token in enumerate(run) if token in self._eos), None)
            if ended is not None:
                run = run[: ended + 1]
            origins = [
                Origin.EXACT_LOOKUP if i < len(guess) and token == guess[i] else Origin.EXACT_MODEL
                for i, token in enumerate(run)
            ]
            lookup.extend(run)
            prefix.keep(base + min(agreed, len(run)))
            yield Drafted(run, origins, drawn.distributions[: len(run)])
            left = 0 if ended is not None else left - len(run)

    def close(self) -> None:
        """Release the slot."""
        self._prefix.release()
