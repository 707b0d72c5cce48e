"""Sources of drafts without a model: each knows one sequence, and guesses what follows it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from draft_service.drafters.choosing import OTHERS_MEMORY
from draft_service.drafters.trees import Nodes, Path, grow
from flyspec.datastore.store import MAX_MATCH, Datastore
from flyspec.drafter_names import DrafterKind
from flyspec.lookup import PromptLookup
from flyspec.lookup.ngrams import MAX_COMPARED
from flyspec.lookup.recycling import Recycled
from flyspec.lookup.shared import FinishedTexts
from flyspec.recent import Share
from flyspec.values.rounds import TopTokens
from flyspec.values.tokens import Origin

RANK_WEIGHT = 4.0
"""Weight, in tokens, of what is assumed of a candidate's rank: right half as often as the last."""
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

    def tree(self, tokens: Sequence[int], max_tokens: int, max_tree_tokens: int) -> Nodes | None:
        """Return a tree of up to so many tokens that may follow, with paths of up to `max_tokens`.

        None if this source makes chains only.
        """
        return None

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
        self._ranks: dict[tuple[int, int], Share] = {}
        """Frequencies of right candidates, by the number of tokens they follow and by rank."""

    def extend(self, token_ids: Sequence[int]) -> None:
        text = [*self._last, *token_ids]
        if self._ranks:  # there is a tree to be made
            self._rate(text)
        self._recycled.read(text)
        self._last = text[-2:]

    def truncate(self, length: int) -> None:
        self._last = []  # what follows has to do without these two

    def guess(self, tokens: Sequence[int], max_tokens: int) -> Guess:
        return Guess(*self._recycled.chain(tokens[-2:], max_tokens))

    def tree(self, tokens: Sequence[int], max_tokens: int, max_tree_tokens: int) -> Nodes:
        """Return the likeliest candidates of candidates, by how often each rank was right of late.

        The paper's tree has one shape for all rounds; this one also knows whether candidates follow
        two tokens or one, and grows only where there are any.
        """
        last = tokens[-2:]
        self._ranks.setdefault((2, 0), Share())

        def candidates(path: Path) -> list[tuple[int, float]]:
            before, token = (-1, *last, *path)[-2:]
            token_ids, followed = self._recycled.candidates(before, token)
            return [(each, self._chance(followed, i)) for i, each in enumerate(token_ids)]

        return grow(max_tree_tokens, max_tokens, candidates, Origin.EXACT_LOOKUP)

    def _chance(self, followed: int, rank: int) -> float:
        share = self._ranks.get((followed, rank))
        prior = 0.5 ** (rank + 1)
        return share.value(prior, RANK_WEIGHT) if share else prior

    def _rate(self, text: Sequence[int]) -> None:
        """Count which candidates were right in a text."""
        for before, token, following in zip(text, text[1:], text[2:], strict=False):
            token_ids, followed = self._recycled.candidates(before, token)
            for rank, candidate in enumerate(token_ids):
                share = self._ranks.setdefault((followed, rank), Share())
                share.observe(candidate == following, OTHERS_MEMORY)

    def learn(self, top: TopTokens) -> None:
        self._recycled.learn(top)


class DatastoreSource(DraftSource):
    """REST: retrieval from a datastore."""

    kind = "rest"

    def __init__(self, datastore: Datastore) -> None:
        self._datastore = datastore

    def guess(self, tokens: Sequence[int], max_tokens: int) -> Guess:
        return Guess(*self._datastore.find(tokens[-MAX_MATCH:], max_tokens))
