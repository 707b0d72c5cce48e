"""Knowledge from outputs that may serve other sequences: those of one sharing scope."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

from flyspec.lookup.ngrams import MAX_NGRAM, NgramIndex
from flyspec.lookup.recycling import Recycled

MAX_TEXT_TOKENS = 1 << 16
"""Tokens of finished outputs kept per scope: about 20 MB."""
MAX_OUTPUT_TOKENS = 1 << 12
"""Of one output, the last ones."""
MAX_SCOPES = 64
"""Scopes kept; beyond them, the one that was not used for longest is dropped."""
SEPARATOR = (1 << 32) - 1
"""Between two outputs; no token ID."""


class FinishedTexts:
    """The n-grams of finished outputs. Safe to use from several threads.

    Two generations of half of `MAX_TEXT_TOKENS`: the older one goes when the newer one is full.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._newer, self._older = NgramIndex(MAX_NGRAM), NgramIndex(MAX_NGRAM)

    def add(self, token_ids: Sequence[int]) -> None:
        with self._lock:
            if len(self._newer.token_ids) + len(token_ids) > MAX_TEXT_TOKENS // 2:
                self._older, self._newer = self._newer, NgramIndex(MAX_NGRAM)
            self._newer.extend(token_ids[-MAX_OUTPUT_TOKENS:])
            self._newer.extend((SEPARATOR,))

    def find(self, last_tokens: Sequence[int], max_tokens: int) -> tuple[list[int], int]:
        """Return what followed the longest match of the last tokens, and its length (0: none)."""
        best: list[int] = []
        longest = 0
        with self._lock:
            for index in (self._newer, self._older):
                match = index.match_of(last_tokens)
                if match is not None and match.length > longest:
                    run = index.token_ids[match.place : match.place + max_tokens]
                    end = run.index(SEPARATOR) if SEPARATOR in run else len(run)
                    best, longest = run[:end], match.length
        return (best, longest) if best else ([], 0)


class Shared:
    """Knowledge shared by the sequences of one scope."""

    def __init__(self) -> None:
        self.texts, self.recycled = FinishedTexts(), Recycled()


class Scopes:
    """The sharing scopes of a service, by name. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._scopes: OrderedDict[str, Shared] = OrderedDict()

    def get(self, scope: str) -> Shared | None:
        """Return what a scope shares; None for the empty one, whose sequences share nothing."""
        if not scope:
            return None
        with self._lock:
            shared = self._scopes.setdefault(scope, Shared())
            self._scopes.move_to_end(scope)
            if len(self._scopes) > MAX_SCOPES:
                self._scopes.popitem(last=False)
            return shared
