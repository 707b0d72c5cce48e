"""Drafts by prompt lookup alone: no model, no torch, any vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from draft_service.drafters.base import Drafting, Scored
from flyspec.lookup import PromptLookup
from flyspec.values.admin import DrafterInfo
from flyspec.values.rounds import DraftOpen
from flyspec.values.tokens import Drafted, Origin, TokenDistribution


class PromptLookupDrafter:
    """Copies what followed an earlier occurrence of the last tokens.

    Sequences have at most `max_length` tokens (0: no limit).
    """

    info = DrafterInfo("prompt_lookup", "prompt_lookup")
    needs_model = False

    def __init__(self, max_length: int = 0) -> None:
        self.max_length = max_length

    def open(self, open_: DraftOpen) -> PromptLookupSession:
        return PromptLookupSession(open_, self.max_length)


class PromptLookupSession:
    """A sequence and its n-gram index."""

    def __init__(self, open_: DraftOpen, max_length: int) -> None:
        self._lookup = PromptLookup(open_.token_ids)
        self.token_ids = self._lookup.token_ids
        self._max_length = max_length
        self._distributions = open_.distribution is not None

    def move(self, keep_length: int, append_token_ids: Sequence[int]) -> None:
        self._lookup.truncate(keep_length)
        self._lookup.extend(append_token_ids)

    def propose(
        self, max_tokens: int, min_confidence: float = 0.0, num_scored: int = 0
    ) -> Drafting:
        """Propose one run of copied tokens, without confidences, or nothing."""
        if num_scored := min(num_scored, len(self._lookup)):
            behind = self.token_ids[-num_scored:]
            self._lookup.truncate(len(self._lookup) - num_scored)
            yield Scored(self._lookup.follow(behind))
        if self._max_length:
            max_tokens = min(max_tokens, self._max_length - len(self._lookup))
        if run := self._lookup.propose(max_tokens):
            self._lookup.extend(run)
            # The drafter is certain of a copied token: a point mass, which is sent empty.
            certain = [TokenDistribution()] * len(run) if self._distributions else ()
            yield Drafted(run, [Origin.EXACT_LOOKUP] * len(run), certain)

    def close(self) -> None: ...
