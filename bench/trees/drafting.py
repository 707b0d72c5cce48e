"""Drafters of chains and of trees, for several texts side by side, one round after another.

Chains are made by the draft service's own drafters. Trees are made of the same: the draft model's
probabilities, lookup's chains, and the candidates of recycling.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.trees.reading import Reader
from bench.trees.selection import (
    Candidates,
    Drafts,
    Path,
    Selection,
    best_chain,
    chain,
    chain_values,
    dynamic_tree,
    ranked_tree,
    trie,
)
from draft_service.drafters.base import Drafter, Drafting
from draft_service.drafters.choosing import OTHERS_MEMORY, AcceptanceTally, Chooser, Evidence
from draft_service.drafters.sources import DraftSource, LookupSource, RecyclingSource
from flyspec.engine.model import Draw, Model
from flyspec.lookup.recycling import NUM_CANDIDATES, Recycled
from flyspec.prefix import num_same
from flyspec.values.rounds import DraftOpen, TopTokens
from flyspec.values.tokens import Drafted, SamplingParams

WIDTH = NUM_CANDIDATES
"""Candidates of the draft model after each node, and nodes expanded per level (EAGLE-2 has 10)."""
RANK_WEIGHT = 4.0
"""Weight, in tokens, of what is assumed of a rank: that it is right half as often as the last."""


class RoundCosts(NamedTuple):
    """Time of a round's parts, ns: a step of target and draft model by rows, and the rest."""

    verify: Callable[[int], float]
    draft: Callable[[int], float]
    rest: float

    def after_drafting(self, drafts: Drafts) -> float:
        return self.verify(1 + len(drafts.paths)) + self.rest

    def __call__(self, drafts: Drafts) -> float:
        return sum(map(self.draft, drafts.draft_steps)) + self.after_drafting(drafts)


@dataclass
class SideBySide:
    """Texts that are drafted side by side, each known by its number."""

    prompts: Sequence[list[int]]
    texts: Sequence[list[int]]
    stops: frozenset[int]
    done: list[int] = field(init=False)
    """How many tokens of each text there are."""

    def __post_init__(self) -> None:
        self.done = [0] * len(self.texts)

    def sequence(self, index: int) -> list[int]:
        return [*self.prompts[index], *self.texts[index][: self.done[index]]]

    @property
    def unfinished(self) -> list[int]:
        return [i for i, text in enumerate(self.texts) if self.done[i] < len(text)]


class DraftingMethod(ABC):
    """A way of drafting the texts of a batch."""

    learns = True
    """Whether it wants the target's likeliest tokens after every row."""

    def __init__(self, batch: SideBySide) -> None:
        self.batch = batch

    @abstractmethod
    def propose(self, indices: Sequence[int], num_nodes: int) -> list[Drafts]:
        """Return the drafts of a round for each of these texts, at most `num_nodes`."""

    def learn(  # noqa: B027
        self, index: int, drafts: Drafts, tops: Sequence[TopTokens], new: list[int]
    ) -> None:
        """Note what the target said of the drafts, and the text's next tokens."""

    def close(self) -> None:  # noqa: B027
        """Release slots."""


class Clock:
    """The time of the text whose drafter is at work, ns."""

    def __init__(self) -> None:
        self.now = 1.0

    def __call__(self) -> int:
        return int(self.now)


class Chains(DraftingMethod):
    """What a drafter of the draft service proposes, on a clock that counts `costs`."""

    def __init__(
        self, batch: SideBySide, drafter: Drafter, model: Model, clock: Clock, costs: RoundCosts
    ) -> None:
        super().__init__(batch)
        self._model, self._clock, self._costs = model, clock, costs
        self.learns = drafter.info.num_top_tokens > 0
        opens = (DraftOpen(ids, SamplingParams(), 0) for ids in batch.prompts)
        self._sessions = list(map(drafter.open, opens))
        self._now = [clock.now] * len(batch.texts)

    def propose(self, indices: Sequence[int], num_nodes: int) -> list[Drafts]:
        work = {i: self._sessions[i].propose(num_nodes) for i in indices}
        tokens: dict[int, list[int]] = {i: [] for i in indices}
        steps = dict.fromkeys(indices, 0)
        waiting = {i: self._next(i, work[i], None, tokens[i]) for i in indices}
        while draws := {i: draw for i, draw in waiting.items() if draw is not None}:
            answers = self._model.draw(list(draws.values()))
            waiting = {}
            for index, drawn in zip(draws, answers, strict=True):
                steps[index] += len(drawn.token_ids)
                self._now[index] += len(drawn.token_ids) * self._costs.draft(1)
                waiting[index] = self._next(index, work[index], drawn, tokens[index])
        return [Drafts(chain(tokens[i]), [1] * steps[i]) for i in indices]

    def _next(
        self, index: int, work: Drafting, drawn: Drafted | None, tokens: list[int]
    ) -> Draw | None:
        """Return the next draw that a proposal wants; `tokens` gets what it drafts until then."""
        self._clock.now = self._now[index]
        try:
            item = next(work) if drawn is None else work.send(drawn)
            while not isinstance(item, Draw):
                if isinstance(item, Drafted):
                    tokens += item.token_ids
                item = next(work)
        except StopIteration:
            return None
        return item

    def learn(self, index: int, drafts: Drafts, tops: Sequence[TopTokens], new: list[int]) -> None:
        session, length = self._sessions[index], len(self.batch.sequence(index))
        for top in tops:
            session.learn(top)
        accepted = num_same(session.token_ids[length:], new)
        session.move(length + accepted, new[accepted:])
        self._now[index] += self._costs.after_drafting(drafts)

    def close(self) -> None:
        for session in self._sessions:
            session.close()


class Trees(DraftingMethod):
    """Trees, some of which ask the draft model for candidates."""

    def __init__(self, batch: SideBySide, model: Reader) -> None:
        super().__init__(batch)
        self._model = model

    @abstractmethod
    def select(self, index: int, num_nodes: int) -> Selection:
        """Select the tree of a round of one text."""

    def propose(self, indices: Sequence[int], num_nodes: int) -> list[Drafts]:
        work = {i: self.select(i, num_nodes) for i in indices}
        found: dict[int, Drafts] = {}
        answers: dict[int, list[Candidates] | None] = dict.fromkeys(indices)
        while answers:
            asked: dict[int, Sequence[Path]] = {}
            for index, answer in answers.items():
                try:
                    asked[index] = next(work[index]) if answer is None else work[index].send(answer)
                except StopIteration as end:
                    found[index] = end.value
            done = self.batch.done
            self._model.load((i, done[i], path) for i, paths in asked.items() for path in paths)
            answers = {
                i: [self._model.after(i, done[i], path) for path in paths]
                for i, paths in asked.items()
            }
        return [found[i] for i in indices]


class ModelTrees(Trees):
    """EAGLE-2's dynamic tree of the draft model."""

    learns = False

    def select(self, index: int, num_nodes: int) -> Selection:
        return dynamic_tree(num_nodes, WIDTH, self.batch.stops)


class RecycledTrees(Trees):
    """Token Recycling's candidates, the likeliest of them by how often each rank was right.

    The paper's tree has one shape for all rounds; this one also knows whether a node's candidates
    follow its last two tokens or one, and grows only where there are any.
    """

    def __init__(self, batch: SideBySide, model: Reader) -> None:
        super().__init__(batch, model)
        self._recycled = [Recycled() for _ in batch.texts]
        self._sources = [RecyclingSource(each) for each in self._recycled]
        self._ranks: dict[tuple[int, int], AcceptanceTally] = {}
        for source, prompt in zip(self._sources, batch.prompts, strict=True):
            source.extend(prompt)

    def select(self, index: int, num_nodes: int) -> Selection:
        last, recycled = self.batch.sequence(index)[-2:], self._recycled[index]

        def candidates(path: Path) -> list[tuple[int, float]]:
            token_ids, followed = recycled.candidates(*(-1, *last, *path)[-2:])
            return [(token, self._chance(followed, i)) for i, token in enumerate(token_ids)]

        yield from ()  # asks for nothing
        return Drafts(ranked_tree(num_nodes, candidates, self.batch.stops))

    def _chance(self, followed: int, rank: int) -> float:
        prior = 0.5 ** (rank + 1)
        tally = self._ranks.get((followed, rank))
        return tally.chance(prior, RANK_WEIGHT) if tally else prior

    def learn(self, index: int, drafts: Drafts, tops: Sequence[TopTokens], new: list[int]) -> None:
        context = [-1, *self.batch.sequence(index)[-2:], *new]
        befores, tokens = context[-len(new) - 2 : -2], context[-len(new) - 1 : -1]
        for before, token, right in zip(befores, tokens, new, strict=True):
            token_ids, followed = self._recycled[index].candidates(before, token)
            for rank, candidate in enumerate(token_ids):
                tally = self._ranks.setdefault((followed, rank), AcceptanceTally())
                tally.add(candidate == right, candidate != right, OTHERS_MEMORY)
        source = self._sources[index]
        for top in tops:
            source.learn(top)
        source.extend(new)


class Sources(Trees):
    """Lookup, recycling and the draft model together.

    A token's chance is what its source had accepted of late, as the composed drafter counts it, or
    the draft model's own probability.
    """

    def __init__(self, batch: SideBySide, model: Reader) -> None:
        super().__init__(batch, model)
        evidence: Evidence = {}
        self._sources: list[list[DraftSource]] = [
            [LookupSource(), RecyclingSource()] for _ in batch.texts
        ]
        self._choosers = [Chooser(evidence) for _ in batch.texts]
        self._guesses: list[list[tuple[object, Sequence[int]]]] = [[] for _ in batch.texts]
        for sources, prompt in zip(self._sources, batch.prompts, strict=True):
            for source in sources:
                source.extend(prompt)

    def guesses(self, index: int, num_nodes: int) -> list[tuple[Sequence[int], float]]:
        """Return the chains that need no model, with the chance of each one's tokens."""
        sequence, guesses = self.batch.sequence(index), self._guesses[index]
        guesses.clear()
        for source in self._sources[index]:
            guess = source.guess(sequence, num_nodes)
            guesses.append((source.class_of(guess), guess.token_ids))
        chance = self._choosers[index].chance
        return [(token_ids, chance(kind)) for kind, token_ids in guesses]

    def learn(self, index: int, drafts: Drafts, tops: Sequence[TopTokens], new: list[int]) -> None:
        for kind, token_ids in self._guesses[index]:
            self._choosers[index].followed(kind, token_ids, new)
        for source in self._sources[index]:
            for top in tops:
                source.learn(top)
            source.extend(new)


class BestChains(Sources):
    """The one chain that promises most by the values that the trees go by."""

    def select(self, index: int, num_nodes: int) -> Selection:
        return best_chain(num_nodes, self.guesses(index, num_nodes), self.batch.stops)


class Tries(Sources):
    """The chains of all three in one trie."""

    def select(self, index: int, num_nodes: int) -> Selection:
        return trie(num_nodes, chain_values(self.guesses(index, num_nodes)), self.batch.stops)


class JointTrees(Sources):
    """EAGLE-2's tree of the draft model, with the chains of lookup and recycling in it."""

    def select(self, index: int, num_nodes: int) -> Selection:
        others = chain_values(self.guesses(index, num_nodes))
        return dynamic_tree(num_nodes, WIDTH, self.batch.stops, others)
