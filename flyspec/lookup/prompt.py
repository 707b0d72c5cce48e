"""Prompt lookup: drafts by copying what followed an earlier occurrence of the last few tokens."""

from __future__ import annotations

from collections.abc import Iterable

from flyspec.lookup.ngrams import NgramIndex

MIN_NGRAM = 2


class PromptLookup(NgramIndex):
    """A token sequence that proposes its own continuation.

    Looks up the last n tokens in the sequence, for n from `MAX_NGRAM` down to `MIN_NGRAM`, and
    proposes what followed their most recent occurrence; among the occurrences of the longest
    n-gram, the one before which most tokens agree.
    """

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        super().__init__(MIN_NGRAM)
        self.extend(token_ids)

    def follow(self, token_ids: Iterable[int]) -> list[bool]:
        """Append tokens; return for each whether it would have been proposed."""
        agreements = []
        for token in token_ids:
            agreements.append(self.propose(1) == [token])
            self.extend((token,))
        return agreements

    def propose(self, max_tokens: int) -> list[int]:
        """Propose up to `max_tokens` tokens; none if the last tokens never occurred before."""
        return self.find(max_tokens)[0]

    def find(self, max_tokens: int) -> tuple[list[int], int]:
        """Return a proposal, and the length of the match that it follows (0: none).

        A continuation that reaches the end of the sequence is repeated, so that periodic text is
        continued to full length.
        """
        if max_tokens <= 0 or (match := self.match()) is None:
            return [], 0
        period = self.token_ids[match.place : match.place + max_tokens]
        repeats = -(-max_tokens // len(period))
        return (period * repeats)[:max_tokens], match.length
