"""Drafts by prompt lookup alone: no model, no torch, any vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from draft_service.drafters.base import Drafted, Work
from flyspec.lookup import PromptLookup
from flyspec.types import DrafterInfo, Origin, SamplingParams


class PromptLookupDrafter:
    """Copies what followed the last tokens before. Sequences are at most `max_length` (0: any)."""

    info = DrafterInfo("prompt_lookup", "prompt_lookup")
    needs_model = False

    def __init__(self, max_length: int = 0) -> None:
        self._max_length = max_length

    def open(
        self, token_ids: Sequence[int], sampling: SamplingParams, seed: int
    ) -> PromptLookupSession:
        """Index the sequence. Sampling has no say in what is copied."""
        return PromptLookupSession(token_ids, self._max_length)


class PromptLookupSession:
    """A sequence and its n-gram index."""

    def __init__(self, token_ids: Sequence[int], max_length: int) -> None:
        self._lookup = PromptLookup(token_ids)
        self._max_length = max_length

    @property
    def token_ids(self) -> Sequence[int]:
        """The sequence with the last proposal."""
        return self._lookup.token_ids

    def move(self, keep_length: int, append_token_ids: Sequence[int]) -> None:
        """Truncate, then append."""
        self._lookup.truncate(keep_length)
        self._lookup.extend(append_token_ids)

    def propose(self, max_tokens: int) -> Work:
        """One run of copied tokens, or nothing."""
        if self._max_length:
            max_tokens = min(max_tokens, self._max_length - len(self._lookup))
        if run := self._lookup.propose(max_tokens):
            self._lookup.extend(run)
            yield Drafted(run, [Origin.EXACT_LOOKUP] * len(run))

    def close(self) -> None:
        """Nothing is held outside."""
