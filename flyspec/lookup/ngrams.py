"""An incremental index of the n-grams of a token sequence: where did these last tokens occur?

Adding or removing a token costs one dictionary update for each n, whatever the length.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

BITS = 32
"""Of a token ID. An n-gram's key is its IDs one after the other, so that keys never collide."""
MAX_NGRAM = 4
MAX_COMPARED = 32
"""Maximum tokens that are compared to find the longest match."""
MAX_PLACES = 8
"""Maximum occurrences of an n-gram that are compared, most recent first."""


class Match(NamedTuple):
    """The last `length` tokens occur before position `place` as well (at most `MAX_COMPARED`)."""

    place: int
    length: int


class NgramIndex:
    """A sequence of token IDs below 2^32, and the places of its n-grams.

    Indexes n-grams of `MAX_NGRAM` down to `min_ngram` tokens. An occurrence counts once a token
    follows it.
    """

    def __init__(self, min_ngram: int) -> None:
        self.token_ids: list[int] = []
        # For each n, longest first: n, the bits of a key, the position after the last occurrence
        # of each n-gram, and for every position the one that it displaced (-1: none).
        self._levels: list[tuple[int, int, dict[int, int], array[int]]] = [
            (n, (1 << BITS * n) - 1, {}, array("q")) for n in range(MAX_NGRAM, min_ngram - 1, -1)
        ]
        self._key = 0  # of the last `MAX_NGRAM` tokens

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        tokens, levels, mask, key = self.token_ids, self._levels, self._levels[0][1], self._key
        end = len(tokens)
        for token in token_ids:
            for n, bits, latest, displaced in levels:
                if end < n:
                    displaced.append(-1)
                    continue
                ngram = key & bits
                displaced.append(latest.get(ngram, -1))
                latest[ngram] = end
            tokens.append(token)
            key = (key << BITS | token) & mask
            end += 1
        self._key = key

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, or all if there are fewer."""
        tokens, levels = self.token_ids, self._levels
        for end in range(len(tokens) - 1, length - 1, -1):
            tokens.pop()
            self._key >>= BITS
            if end >= MAX_NGRAM:
                self._key |= tokens[end - MAX_NGRAM] << BITS * (MAX_NGRAM - 1)
            for n, bits, latest, displaced in levels:
                place = displaced.pop()
                if place >= 0:
                    latest[self._key & bits] = place
                elif end >= n:
                    del latest[self._key & bits]

    def match(self) -> Match | None:
        """Return the longest match of the sequence's own last tokens, the most recent of several.

        None if not even its last `min_ngram` tokens occurred before.
        """
        return self._longest(self.token_ids, self._key)

    def match_of(self, last_tokens: Sequence[int]) -> Match | None:
        """Return the longest match of another sequence's last tokens, as `match` does."""
        key = 0
        for token in last_tokens[-MAX_NGRAM:]:
            key = key << BITS | token
        return self._longest(last_tokens, key)

    def _longest(self, last_tokens: Sequence[int], key: int) -> Match | None:
        end = len(last_tokens)
        for n, bits, latest, displaced in self._levels:
            if end < n or (place := latest.get(key & bits, -1)) < 0:
                continue
            if n < MAX_NGRAM:
                return Match(place, n)
            return max(
                (Match(at, self._agreement(at, last_tokens)) for at in _chain(place, displaced)),
                key=lambda match: match.length,  # the first of several, which is most recent
            )
        return None

    def _agreement(self, place: int, last_tokens: Sequence[int]) -> int:
        """Return how many tokens before `place` equal the last ones."""
        tokens, count = self.token_ids, MAX_NGRAM
        most = min(place, len(last_tokens), MAX_COMPARED)
        while count < most and tokens[place - 1 - count] == last_tokens[-1 - count]:
            count += 1
        return count


def _chain(place: int, displaced: Sequence[int]) -> Iterator[int]:
    """Yield the places of an n-gram, most recent first."""
    for _ in range(MAX_PLACES):
        yield place
        place = displaced[place]
        if place < 0:
            return
