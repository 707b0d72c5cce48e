"""Drafters without a model: prompt lookup, Token Recycling and REST. Any vocabulary, no torch.

Each has a source, which knows one sequence and guesses what follows it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from draft_service.drafters.base import Drafting, Scored, sure
from draft_service.drafters.trees import Nodes, Path, drafted, grow
from flyspec.datastore.store import MAX_MATCH, Datastore
from flyspec.drafter_names import DrafterKind
from flyspec.lookup import PromptLookup
from flyspec.lookup.ngrams import MAX_COMPARED
from flyspec.lookup.recycling import NUM_CANDIDATES, Recycled
from flyspec.lookup.shared import FinishedTexts, Scopes, Shared
from flyspec.recent import Share
from flyspec.values.admin import DrafterInfo
from flyspec.values.rounds import DraftOpen, TopTokens
from flyspec.values.tokens import Drafted, Origin, TokenDistribution

OTHERS_MEMORY = 0.9995
"""Factor by which the evidence of all sequences fades with each further token."""
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


MakeSource = Callable[[DraftOpen], DraftSource]
"""Creates the source of a new session, before any token is read."""


class RetrievalDrafter:
    """Drafts what one source guesses. Sequences have at most `max_length` tokens (0: no limit).

    `make_source` makes the sources of its sessions, for drafters that have several, too.
    """

    needs_model = False

    def __init__(self, info: DrafterInfo, make_source: MakeSource, max_length: int = 0) -> None:
        self.info, self.max_length, self.make_source = info, max_length, make_source

    def open(self, open_: DraftOpen) -> RetrievalSession:
        return RetrievalSession(open_, [self.make_source(open_)], self.max_length)


def prompt_lookup(scopes: Scopes, max_length: int = 0) -> RetrievalDrafter:
    """Return the drafter that copies what followed an earlier occurrence of the last tokens."""

    def make(open_: DraftOpen) -> LookupSource:
        shared = _shared(scopes, open_)
        return LookupSource(shared.texts if shared else None)

    return RetrievalDrafter(DrafterInfo("prompt_lookup", "prompt_lookup"), make, max_length)


def token_recycling(scopes: Scopes, max_length: int = 0) -> RetrievalDrafter:
    """Return the drafter that repeats what the target said after the same tokens."""

    def make(open_: DraftOpen) -> RecyclingSource:
        shared = _shared(scopes, open_)
        return RecyclingSource(shared.recycled if shared else None)

    info = DrafterInfo(
        "token_recycling", "token_recycling", num_top_tokens=NUM_CANDIDATES, makes_trees=True
    )
    return RetrievalDrafter(info, make, max_length)


def rest(datastore: Datastore, max_length: int = 0) -> RetrievalDrafter:
    """Return the drafter that retrieves from a datastore, for its tokenizer only."""
    info = DrafterInfo("rest", "rest", tokenizer_fingerprint=datastore.facts.tokenizer_fingerprint)
    return RetrievalDrafter(info, lambda _: DatastoreSource(datastore), max_length)


def _shared(scopes: Scopes, open_: DraftOpen) -> Shared | None:
    """Return what a session shares, with sessions of the same tokenizer only."""
    scope = open_.sharing_scope
    return scopes.get(f"{scope} {open_.tokenizer_fingerprint}" if scope else "")


class RetrievalSession:
    """A sequence and its sources, which read it when a proposal needs them."""

    def __init__(
        self, open_: DraftOpen, sources: Sequence[DraftSource], max_length: int = 0
    ) -> None:
        self.token_ids: list[int] = list(open_.token_ids)
        self._prompt_length = open_.prompt_length or len(open_.token_ids)
        self._distributions = open_.distribution is not None
        self._max_length, self._sources = max_length, sources
        self._read = 0  # tokens that the sources have read
        self._read_all()

    def move(self, keep_length: int, append_token_ids: Sequence[int]) -> None:
        del self.token_ids[keep_length:]
        self.token_ids.extend(append_token_ids)
        if keep_length < self._read:
            self._read = keep_length
            for source in self._sources:
                source.truncate(keep_length)

    def learn(self, top: TopTokens) -> None:
        for source in self._sources:
            source.learn(top)

    def propose(
        self, max_tokens: int, min_confidence: float = 0.0, num_scored: int = 0
    ) -> Drafting:
        """Propose one run of tokens at once, or nothing; without confidences, of any length."""
        (source,) = self._sources
        if num_scored:
            yield Scored(self._score(source, num_scored))
        self._read_all()
        guess = source.guess(self.token_ids, self._room(max_tokens))
        count = sure(min_confidence, guess.confidences, len(guess.token_ids))
        if count:
            yield self.drafted(guess, count)

    def propose_tree(
        self, max_tokens: int, max_tree_tokens: int, min_confidence: float = 0.0
    ) -> Drafting:
        """Propose the source's tree, or what it guesses if it makes none."""
        (source,) = self._sources
        room = self._room(max_tokens)
        self._read_all()
        nodes = None if self._distributions else source.tree(self.token_ids, room, max_tree_tokens)
        if nodes is None:
            yield from self.propose(max_tokens, min_confidence)
        elif nodes:
            yield self.taken(drafted(nodes, max_tree_tokens, min_confidence))

    def taken(self, tree: Drafted) -> Drafted:
        """Return drafts, which become part of the sequence if they are a chain."""
        if not tree.parents:
            self.token_ids += tree.token_ids
        return tree

    def drafted(self, guess: Guess, count: int) -> Drafted:
        """Append the first `count` tokens of a guess, and return them as drafted."""
        run = list(guess.token_ids[:count])
        self.token_ids += run
        # There is no distribution behind a copied token: a point mass, which is sent empty.
        certain = [TokenDistribution()] * count if self._distributions else ()
        return Drafted(run, [Origin.EXACT_LOOKUP] * count, certain, guess.confidences[:count])

    def close(self) -> None:
        for source in self._sources:
            source.finish(self.token_ids[self._prompt_length : self._read])

    def _room(self, max_tokens: int) -> int:
        if self._max_length:
            return max(0, min(max_tokens, self._max_length - len(self.token_ids)))
        return max_tokens

    def _read_all(self) -> None:
        self._read_to(len(self.token_ids))

    def _read_to(self, length: int) -> None:
        unread = self.token_ids[self._read : length]
        if unread:
            for source in self._sources:
                source.extend(unread)
            self._read = length

    def _score(self, source: DraftSource, count: int) -> list[bool]:
        """Read the sequence, and return whether each of its last tokens would have been guessed."""
        first = max(self._read, len(self.token_ids) - count)
        agreements = []
        for length in range(first, len(self.token_ids)):
            self._read_to(length)
            following = self.token_ids[length : length + 1]
            before = self.token_ids[max(0, length - MAX_COMPARED) : length]
            agreements.append(list(source.guess(before, 1).token_ids) == following)
        return agreements
