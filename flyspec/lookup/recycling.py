"""Token Recycling (arXiv 2408.08696): drafts from what the target said after the same tokens.

The target's most likely tokens after every verified token, those of rejected drafts included, are
kept by the token that they follow (the paper's adjacency matrix) and, which the paper does not, by
the last two tokens, since a chain has no room for several candidates. Of either, the newest count.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from flyspec.values.rounds import TopTokens

NUM_CANDIDATES = 8
"""Candidates per token, as in the paper."""
MAX_CONTEXTS = 1 << 16
"""Contexts kept; beyond them, the half that was not renewed for longest is dropped."""
_BITS = 32

Candidates = tuple[int, ...]


class Recycled:
    """Candidates by context, most likely first, of one sequence or of several that share them.

    Safe to use from several threads: each step replaces whole entries.
    """

    def __init__(self) -> None:
        self._after: dict[int, Candidates] = {}

    def learn(self, top: TopTokens) -> None:
        """Keep a round's candidates."""
        width = top.width
        for row, (before, token) in enumerate(top.contexts):
            candidates = tuple(top.token_ids[row * width : (row + 1) * width])
            self._put(before, token, candidates)

    def read(self, token_ids: Sequence[int]) -> None:
        """Learn from a text: each token becomes the first candidate after the two before it."""
        for before, token, following in zip(token_ids, token_ids[1:], token_ids[2:], strict=False):
            known, _ = self.candidates(before, token)
            others = (each for each in known if each != following)
            self._put(before, token, (following, *islice(others, NUM_CANDIDATES - 1)))

    def chain(
        self, last_tokens: Sequence[int], max_tokens: int
    ) -> tuple[list[int], tuple[float, ...], int]:
        """Return a continuation, no confidences, and how many of the last tokens it follows.

        Goes from token to token, to the first candidate after the last two tokens, else after the
        last one. A context that comes again in the chain takes its next candidate, or ends it.
        """
        chain, length = list[int](), 0
        before, token = (-1, *last_tokens)[-2:] if last_tokens else (-1, -1)
        used: dict[tuple[int, int], int] = {}
        while len(chain) < max_tokens:
            candidates, followed = self.candidates(before, token)
            rank = used.get((before, token), 0)
            if rank >= len(candidates):
                break
            if not chain:
                length = followed
            used[before, token] = rank + 1
            before, token = token, candidates[rank]
            chain.append(token)
        return chain, (), length

    def candidates(self, before: int, token: int) -> tuple[Candidates, int]:
        """Return the candidates after two tokens, and how many of these they are known to follow.

        `before` is -1 if there is one token only.
        """
        pair = self._after.get(before << _BITS | token, ()) if before >= 0 else ()
        return (pair, 2) if pair else (self._after.get(~token, ()), 1)

    def _put(self, before: int, token: int, candidates: Candidates) -> None:
        after = self._after
        for key in (before << _BITS | token, ~token):  # no pair is negative
            after.pop(key, None)  # to the end of the order
            after[key] = candidates
        if len(after) > MAX_CONTEXTS:
            for key in list(islice(after, MAX_CONTEXTS // 2)):
                after.pop(key, None)
