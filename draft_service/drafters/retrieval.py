"""Drafters without a model: prompt lookup, Token Recycling and REST. Any vocabulary, no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draft_service.drafters.base import Drafting, Scored, sure
from draft_service.drafters.sources import (
    DatastoreSource,
    DraftSource,
    Guess,
    LookupSource,
    RecyclingSource,
)
from draft_service.drafters.trees import drafted
from flyspec.datastore.store import Datastore
from flyspec.lookup.ngrams import MAX_COMPARED
from flyspec.lookup.recycling import NUM_CANDIDATES
from flyspec.lookup.shared import Scopes, Shared
from flyspec.values.admin import DrafterInfo
from flyspec.values.rounds import DraftOpen, TopTokens
from flyspec.values.tokens import Drafted, Origin, TokenDistribution

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
