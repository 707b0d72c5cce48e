"""Prompt lookup: drafts by copying what followed earlier occurrences of the last few tokens.

The index is incremental: adding or removing a token costs one dictionary update per n-gram length.
The draft service drafts with it, and the orchestrator falls back to it. No torch, no numpy.
"""

from __future__ import annotations

from collections.abc import Iterable

DEFAULT_MIN_NGRAM = 2
DEFAULT_MAX_NGRAM = 4


class PromptLookup:
    """A token sequence that proposes its own continuation.

    Looks up the last n tokens in the sequence, for n from `max_ngram` down to `min_ngram`, and
    proposes what followed their most recent occurrence. Raises `ValueError` unless
    1 <= min_ngram <= max_ngram.
    """

    def __init__(
        self,
        token_ids: Iterable[int] = (),
        *,
        min_ngram: int = DEFAULT_MIN_NGRAM,
        max_ngram: int = DEFAULT_MAX_NGRAM,
    ) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"1 <= min_ngram <= max_ngram, not {min_ngram} and {max_ngram}")
        self._tokens: list[int] = []
        # For each n, longest first: the position after each n-gram's last occurrence, and for
        # every position the entry that it displaced (-1: none).
        self._levels: list[tuple[int, dict[tuple[int, ...], int], list[int]]] = [
            (n, {}, []) for n in range(max_ngram, min_ngram - 1, -1)
        ]
        self.extend(token_ids)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def token_ids(self) -> list[int]:
        """The sequence; later calls modify the list."""
        return self._tokens

    def extend(self, token_ids: Iterable[int]) -> None:
        tokens, levels = self._tokens, self._levels
        for token in token_ids:
            end = len(tokens)
            for n, latest, displaced in levels:
                if end < n:
                    displaced.append(-1)
                    continue
                ngram = tuple(tokens[end - n : end])
                displaced.append(latest.get(ngram, -1))
                latest[ngram] = end
            tokens.append(token)

    def follow(self, token_ids: Iterable[int]) -> list[bool]:
        """Append tokens; return for each whether it would have been proposed."""
        agreements = []
        for token in token_ids:
            agreements.append(self.propose(1) == [token])
            self.extend((token,))
        return agreements

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens. Raises `ValueError` if there are fewer."""
        tokens = self._tokens
        if not 0 <= length <= len(tokens):
            raise ValueError(f"cannot keep {length} of {len(tokens)} tokens")
        for end in range(len(tokens) - 1, length - 1, -1):
            tokens.pop()
            for n, latest, displaced in self._levels:
                place = displaced.pop()
                if place >= 0:
                    latest[tuple(tokens[end - n : end])] = place
                elif end >= n:
                    del latest[tuple(tokens[end - n : end])]

    def propose(self, max_tokens: int) -> list[int]:
        """Propose up to `max_tokens` tokens; none if the last tokens never occurred before.

        A continuation that reaches the end of the sequence is repeated, so that periodic text is
        continued to full length.
        """
        tokens = self._tokens
        end = len(tokens)
        if max_tokens <= 0:
            return []
        for n, latest, _ in self._levels:
            if end > n and (place := latest.get(tuple(tokens[end - n :]), -1)) >= 0:
                period = tokens[place : place + max_tokens]
                repeats = -(-max_tokens // len(period))
                return (period * repeats)[:max_tokens]
        return []
