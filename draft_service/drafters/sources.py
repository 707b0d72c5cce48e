"""Sources of drafts without a model: each knows one sequence, and guesses what follows it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from flyspec.datastore.store import MAX_MATCH, Datastore
from flyspec.drafter_names import DrafterKind
from flyspec.lookup import PromptLookup
from flyspec.lookup.ngrams import MAX_COMPARED
from flyspec.lookup.recycling import Recycled
from flyspec.lookup.shared import FinishedTexts
from flyspec.values.rounds import TopTokens

MAX_LENGTH_CLASS = 12
"""Guesses that follow longer matches are of one class."""


class Guess(NamedTuple):
    """Tokens that may follow, with confidences if known, and how many tokens led to them."""

    token_ids: Sequence[int]
    confidences: Sequence[float] = ()
    length: int = 0


class DraftSource(ABC):
    """One sequence's source. It reads the sequence's tokens, never its own drafts."""

    kind: DrafterKind

    def class_of(self, guess: Guess) -> tuple[str, int]:
        """Return what guesses as likely to be right have in common."""
        return self.kind, min(guess.length, MAX_LENGTH_CLASS)

    def extend(self, token_ids: Sequence[int]) -> None:  # noqa: B027
        """Read the sequence's next tokens."""

    def truncate(self, length: int) -> None:  # noqa: B027
        """Go back to the first `length` tokens."""

    @abstractmethod
    def guess(self, tokens: Sequence[int], max_tokens: int) -> Guess:
        """Return up to `max_tokens` tokens that may follow `tokens`, which have been read."""

    def learn(self, top: TopTokens) -> None:  # noqa: B027
        """Note what the target would have said in a round."""

    def finish(self, output: Sequence[int]) -> None:  # noqa: B027
        """Note the sequence's output, for sequences of the same sharing scope."""


class LookupSource(DraftSource):
    """Prompt lookup, also in the finished outputs of the same scope if they match longer."""

    kind = "prompt_lookup"

    def __init__(self, texts: FinishedTexts | None = None) -> None:
        self._lookup, self._texts = PromptLookup(), texts

    def extend(self, token_ids: Sequence[int]) -> None:
        self._lookup.extend(token_ids)

    def truncate(self, length: int) -> None:
        self._lookup.truncate(length)

    def guess(self, tokens: Sequence[int], max_tokens: int) -> Guess:
        found, length = self._lookup.find(max_tokens)
        if self._texts is not None and length < MAX_COMPARED:
            elsewhere, longer = self._texts.find(tokens[-MAX_COMPARED:], max_tokens)
            if longer > length:
                found, length = elsewhere, longer
        return Guess(found, length=length)

    def finish(self, output: Sequence[int]) -> None:
        if self._texts is not None and output:
            self._texts.add(output)


class RecyclingSource(DraftSource):
    """Token Recycling, with candidates of its own or those of its scope."""

    kind = "token_recycling"

    def __init__(self, recycled: Recycled | None = None) -> None:
        self._recycled = Recycled() if recycled is None else recycled
        self._last: list[int] = []  # of what was read

    def extend(self, token_ids: Sequence[int]) -> None:
        text = [*self._last, *token_ids]
        self._recycled.read(text)
        self._last = text[-2:]

    def truncate(self, length: int) -> None:
        self._last = []  # what follows has to do without these two

    def guess(self, tokens: Sequence[int], max_tokens: int) -> Guess:
        return Guess(*self._recycled.chain(tokens[-2:], max_tokens))

    def learn(self, top: TopTokens) -> None:
        self._recycled.learn(top)


class DatastoreSource(DraftSource):
    """REST: retrieval from a datastore."""

    kind = "rest"

    def __init__(self, datastore: Datastore) -> None:
        self._datastore = datastore

    def guess(self, tokens: Sequence[int], max_tokens: int) -> Guess:
        return Guess(*self._datastore.find(tokens[-MAX_MATCH:], max_tokens))
