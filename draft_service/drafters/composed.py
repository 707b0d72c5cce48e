"""Drafts with what pays: a source's guess, the model's tokens, or the one and then the other.

Decided anew each round, by what was accepted of each so far and what rounds cost (`Chooser`). The
text is the target's in any case; only its speed depends on the choice. All guesses of all sources
are compared with the text that followed, used or not, since they cost microseconds; of the model,
only what it drafted. Sequences begin with what others have taught.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Hashable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import NamedTuple

from draft_service.drafters.base import DrafterSession, Drafting, Scored, sure
from draft_service.drafters.model import ModelDrafter, ModelSession
from draft_service.drafters.retrieval import (
    OTHERS_MEMORY,
    DraftSource,
    Guess,
    MakeSource,
    RetrievalSession,
)
from draft_service.drafters.trees import Nodes, add_chain, add_choices, best, drafted
from flyspec.engine.model import Draw
from flyspec.lookup.recycling import NUM_CANDIDATES
from flyspec.prefix import num_same
from flyspec.recent import Patience, Share
from flyspec.values.admin import DrafterInfo
from flyspec.values.rounds import DraftOpen
from flyspec.values.tokens import Drafted, Origin, TokenDistribution, still_needed

PRIOR, PRIOR_WEIGHT = 0.7, 4.0
"""A token's chance of being accepted before anything is known, and its weight in tokens."""
OTHERS_WEIGHT = 16.0
"""Weight of other sequences' evidence, in tokens."""
MEMORY = 0.98
"""Factor by which a sequence's own evidence fades with each further token."""
NEWER = 0.2
"""Weight of the newest time in the mean times."""


Evidence = dict[Hashable, Share]
"""Shares of right tokens, by the class of a guess: its source, and how well it matched."""


def expected(chance: float, count: int) -> float:
    """Return how many of `count` tokens are accepted on average, each with this chance."""
    return float(count) if chance >= 1.0 else chance * (1.0 - chance**count) / (1.0 - chance)


@dataclass(slots=True)
class Chooser:
    """One sequence's estimates of its drafts' chances and of the time that rounds take, in ns.

    `others` is the evidence of all sequences, which this one adds to.
    """

    others: Evidence
    rest_ns: float = 0.0
    token_ns: float = 0.0
    own: Evidence = field(default_factory=dict)

    def chance(self, kind: Hashable) -> float:
        """Return the chance that a token of a guess of this class is accepted."""
        others, own = self.others.get(kind), self.own.get(kind)
        prior = others.value(PRIOR, PRIOR_WEIGHT) if others else PRIOR
        return own.value(prior, OTHERS_WEIGHT) if own else prior

    def followed(self, kind: Hashable, guess: Sequence[int], text: Sequence[int]) -> None:
        """Learn from a guess, and the text that followed in its place."""
        right = num_same(guess, text)
        missed = right < min(len(guess), len(text))
        for evidence, memory in ((self.others, OTHERS_MEMORY), (self.own, MEMORY)):
            evidence.setdefault(kind, Share()).observe(right, memory, right + missed)

    def rested(self, ns: int) -> None:
        """Learn how long it was from a proposal to the next request."""
        self.rest_ns = _mean(self.rest_ns, ns)

    def drafted(self, num_tokens: int, ns: int) -> None:
        """Learn how long the model took."""
        if num_tokens:
            self.token_ns = _mean(self.token_ns, ns / num_tokens)

    def worth(self, accepted: float, num_drawn: int) -> float:
        """Return a round's tokens per ns, if the model draws `num_drawn` of its drafts."""
        return (1.0 + accepted) / max(1.0, self.rest_ns + num_drawn * self.token_ns)


def _mean(mean: float, value: float) -> float:
    return mean + NEWER * (value - mean) if mean else value


MODEL = "model"


class ComposedDrafter:
    """Drafts with sources, in order of preference, and perhaps a model."""

    def __init__(
        self,
        sources: Sequence[MakeSource],
        model: ModelDrafter | None,
        max_length: int,
        tokenizer_fingerprint: str = "",
    ) -> None:
        self.info = DrafterInfo(
            "composed",
            "composed",
            model.info.model if model else None,
            "" if model else tokenizer_fingerprint,
            NUM_CANDIDATES,
            makes_trees=True,
        )
        self.needs_model = model is not None
        self.max_length = model.max_length if model else max_length
        self._sources, self._model = sources, model
        self._evidence: Evidence = {}
        self._patience = defaultdict[str, Patience](Patience)

    def open(self, open_: DraftOpen) -> DrafterSession:
        model = self._model.open(open_) if self._model else None
        try:
            sources = [make(open_) for make in self._sources]
            return ComposedSession(
                open_, sources, self.max_length, model, self._evidence, self._patience
            )
        except BaseException:
            if model is not None:
                model.close()
            raise


class _Chosen(NamedTuple):
    """Tokens of a guess, then as many of the model."""

    worth: float
    guess: Guess
    num_guessed: int
    num_drawn: int


class ComposedSession(RetrievalSession):
    """A sequence with its sources, and the model's session, which is told of it when used.

    `evidence` and `patience` (by kind of source) are shared with other sequences. A guess takes
    time, too: a source that is not chosen for long is asked now and then only.
    """

    def __init__(
        self,
        open_: DraftOpen,
        sources: Sequence[DraftSource],
        max_length: int,
        model: ModelSession | None,
        evidence: Evidence,
        patience: Mapping[str, Patience],
    ) -> None:
        super().__init__(open_, sources, max_length)
        self._model, self._told = model, len(self.token_ids)
        self._chooser, self._patience = Chooser(evidence), patience
        self._pending: list[tuple[object, Sequence[int]]] = []  # what was guessed, by class
        self._proposed_at = 0  # where the sequence ended then
        self._ended_ns = 0

    def move(self, keep_length: int, append_token_ids: Sequence[int]) -> None:
        super().move(keep_length, append_token_ids)
        self._told = min(self._told, keep_length)
        if keep_length < self._proposed_at:
            self._pending = []

    def propose(
        self, max_tokens: int, min_confidence: float = 0.0, num_scored: int = 0
    ) -> Drafting:
        """Propose the tokens that promise most per time, with confidences."""
        chooser = self._chooser
        self._look_back()
        if num_scored and self._model is not None:
            yield from self._drawn(0, 0.0, num_scored)
        self._read_all()
        chosen = self._best(self._room(max_tokens))
        guess = chosen.guess
        count = sure(min_confidence, guess.confidences, chosen.num_guessed)
        if count:
            yield self.drafted(guess, count)
            min_confidence = still_needed(min_confidence, guess.confidences[:count])
        if chosen.num_drawn and count == chosen.num_guessed and min_confidence <= 1:
            began_ns, at = perf_counter_ns(), len(self.token_ids)
            yield from self._drawn(chosen.num_drawn, min_confidence)
            drawn = self.token_ids[at:]
            chooser.drafted(len(drawn), perf_counter_ns() - began_ns)
            if not count:
                self._pending.append((MODEL, drawn))
        self._ended_ns = perf_counter_ns()

    def _look_back(self) -> None:
        """Learn from what has happened since the last proposal."""
        chooser = self._chooser
        if self._ended_ns:
            chooser.rested(perf_counter_ns() - self._ended_ns)
        text = self.token_ids[self._proposed_at :]
        for kind, token_ids in self._pending:
            chooser.followed(kind, token_ids, text)
        self._pending, self._proposed_at = [], len(self.token_ids)

    def propose_tree(
        self, max_tokens: int, max_tree_tokens: int, min_confidence: float = 0.0
    ) -> Drafting:
        """Propose what `propose` would, with the sources' guesses and the model's other choices.

        A node is worth what its source had accepted of late, or the model's own probability. The
        model draws its tokens as long as they may be among the best nodes.
        """
        if self._distributions:
            yield from self.propose(max_tokens, min_confidence)
            return
        self._look_back()
        self._read_all()
        chooser, nodes = self._chooser, Nodes()
        room = self._room(max_tokens)
        chosen = self._best(room)
        for source in self._sources if room else ():
            guess = source.guess(self.token_ids, room)
            tree = source.tree(self.token_ids, room, max_tree_tokens)
            chance = chooser.chance(source.class_of(guess))
            chances = [chance] * len(guess.token_ids)
            add_chain(nodes, guess.token_ids, chances, Origin.EXACT_LOOKUP)
            for path, node in (tree or {}).items():
                if path not in nodes or nodes[path].value < node.value:
                    nodes[path] = node
        if chosen.num_drawn:
            worst = best(nodes, max_tree_tokens)[max_tree_tokens - 1 :]
            least = max(min_confidence, nodes[worst[0]].value if worst else 0.0)
            spine = yield from self._spine(chosen, least)
            add_chain(nodes, spine.token_ids, spine.confidences, Origin.EXACT_MODEL)
            choices = spine.distributions
            add_choices(nodes, spine.token_ids, choices, Origin.EXACT_MODEL)
        if nodes:
            yield self.taken(drafted(nodes, max_tree_tokens, min_confidence))
        self._ended_ns = perf_counter_ns()

    def _spine(
        self, chosen: _Chosen, min_confidence: float
    ) -> Generator[Draw | Drafted | Scored, Drafted, Drafted]:
        """Let the model draw behind the chosen guess; return both, with the tokens' chances.

        There is a distribution for each drawn token. The sequence stays as it is.
        """
        assert self._model is not None
        tokens, before, count = self.token_ids, len(self.token_ids), chosen.num_guessed
        chances = list(chosen.guess.confidences[:count])
        choices: list[TokenDistribution] = []
        self._model.num_candidates = NUM_CANDIDATES
        needed = still_needed(min_confidence, chances)
        began_ns = perf_counter_ns()
        try:
            tokens += chosen.guess.token_ids[:count]
            if needed <= 1:
                with closing(self._drawn(chosen.num_drawn, needed)) as work:
                    item = next(work, None)
                    while item is not None:
                        if isinstance(item, Drafted):
                            chances += item.confidences
                            choices += item.distributions
                            item = next(work, None)
                            continue
                        drawn = yield item
                        item = work.send(drawn)
            spine = tokens[before:]
        finally:
            self._model.num_candidates = 0
            del tokens[before:]
            self._told = min(self._told, before)
        self._chooser.drafted(len(spine) - count, perf_counter_ns() - began_ns)
        if not count:
            self._pending.append((MODEL, spine))
        return Drafted(spine, distributions=choices, confidences=chances)

    def _best(self, most: int) -> _Chosen:
        """Choose among the sources' guesses, the model, and each guess followed by the model."""
        chooser, drawable = self._chooser, self._model is not None
        nothing = Guess(())
        by_model = chooser.chance(MODEL) if drawable else 0.0
        drawn = most if drawable else 0
        best = _Chosen(chooser.worth(expected(by_model, drawn), drawn), nothing, 0, drawn)
        paid: DraftSource | None = None
        for source in self._sources if most else ():
            if not self._patience[source.kind].tries():
                continue
            guess = source.guess(self.token_ids, most)
            count = len(guess.token_ids)
            if not count:
                continue
            kind = source.class_of(guess)
            self._pending.append((kind, guess.token_ids))
            chance = chooser.chance(kind)
            guess = guess._replace(confidences=(chance,) * count)
            accepted = expected(chance, count)
            for more in {0, drawn and most - count}:
                all_accepted = accepted + chance**count * expected(by_model, more)
                chosen = _Chosen(chooser.worth(all_accepted, more), guess, count, more)
                if chosen.worth > best.worth:
                    best, paid = chosen, source
        if paid is not None:
            self._patience[paid.kind].paid()
        return best

    def _drawn(self, max_tokens: int, min_confidence: float, num_scored: int = 0) -> Drafting:
        """Let the model propose; what it drafts becomes part of the sequence."""
        model, tokens = self._model, self.token_ids
        assert model is not None
        # Of a tree, it still has the tokens that it drew itself.
        self._told += num_same(model.token_ids[self._told :], tokens[self._told :])
        model.move(self._told, tokens[self._told :])
        self._told = len(tokens)
        work = model.propose(max_tokens, min_confidence, num_scored)
        with closing(work):
            item = next(work, None)
            while item is not None:
                if isinstance(item, Drafted):
                    tokens += item.token_ids
                    self._told = len(tokens)
                drawn = yield item
                try:
                    item = work.send(drawn)
                except StopIteration:
                    return

    def close(self) -> None:
        super().close()
        if self._model is not None:
            self._model.close()
