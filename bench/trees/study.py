"""The study of a set of prompts: every method with every number of rows, and measured costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import NamedTuple

from bench.trees.drafting import (
    WIDTH,
    BestChains,
    Chains,
    Clock,
    DraftingMethod,
    JointTrees,
    ModelTrees,
    RecycledTrees,
    RoundCosts,
    SideBySide,
    Trees,
    Tries,
)
from bench.trees.gains import SetRounds, SizedMethod
from bench.trees.reading import Reader
from bench.trees.rounds import TextTally, simulate
from draft_service.drafters.base import Drafter
from draft_service.drafters.composed import ComposedDrafter
from draft_service.drafters.model import ModelDrafter
from draft_service.drafters.retrieval import prompt_lookup, token_recycling
from flyspec.bench.prompts import Group
from flyspec.cli.program import say
from flyspec.config import DraftSettings, VerifySettings
from flyspec.engine.model import Draw, Model, Step
from flyspec.errors import ConfigError, InvalidArgumentError
from flyspec.lab.local_model import LocalModel
from flyspec.lookup.recycling import NUM_CANDIDATES
from flyspec.lookup.shared import Scopes
from flyspec.step_costs import StepCosts
from flyspec.values.admin import MeasuredStep
from flyspec.values.tokens import SamplingParams
from verify_service.step_trial import measure_steps

MS = 1_000_000
DRAWS, DRAW_REPEATS = 16, 20
"""Tokens of a chain whose drawing is timed, and how often."""
STEP_TRIALS = 10
BEST_CHAIN = "best_chain"
TREES: dict[str, type[Trees]] = {
    "eagle2": ModelTrees,
    "recycling_tree": RecycledTrees,
    "trie": Tries,
    "joint_tree": JointTrees,
}


def draw_ns(model: Model) -> float:
    """Return the time in which a draft model draws a token of a chain, ns: the shortest of many."""
    slot = model.cache.acquire().slot
    try:
        draw = Draw(Step(slot, 0, [1]), SamplingParams(), max_tokens=DRAWS)
        times = []
        for _ in range(DRAW_REPEATS):
            began = perf_counter_ns()
            (drawn,) = model.draw([draw])
            times.append((perf_counter_ns() - began) / len(drawn.token_ids))
        return min(times)
    finally:
        model.cache.release(slot)


def step_costs(model: Model) -> StepCosts:
    """Return what a verify service measures at start, the shortest time of each size of several."""
    times: dict[int, list[int]] = {}
    for _ in range(STEP_TRIALS):
        for size, ns in measure_steps(model):
            times.setdefault(size, []).append(ns)
    return StepCosts([MeasuredStep(size, min(times[size])) for size in sorted(times)])


@dataclass(frozen=True)
class MeasuredPair:
    """Both models, and what their steps take."""

    target: LocalModel
    draft: LocalModel
    verify: StepCosts
    drafting: StepCosts
    draw_ns: float

    @classmethod
    def load(cls, model: str, draft_model: str, threads: int, texts: int) -> MeasuredPair:
        """Load and measure them, for as many texts side by side. Raises `ConfigError`."""
        target = LocalModel(VerifySettings(model=model, threads=threads, max_sessions=texts + 1))
        # A slot for a chain's session, one for trees.
        draft = LocalModel(
            DraftSettings(model=draft_model, threads=threads, max_sessions=2 * texts + 1)
        )
        if target.info.vocab_size != draft.info.vocab_size:
            raise ConfigError("--draft-model has another vocabulary than --model")
        return cls(
            target, draft, step_costs(target.model), step_costs(draft.model),
            draw_ns(draft.model),
        )  # fmt: skip

    def draft_ns(self, rows: int) -> float:
        """Return the time of a draft step.

        One of several rows takes as much longer than a chain's as a forward does.
        """
        return self.draw_ns + self.drafting(rows) - self.drafting(1)

    def costs(self, rest_ms: float) -> RoundCosts:
        return RoundCosts(self.verify, self.draft_ns, rest_ms * MS)


def chain_drafters(pair: MeasuredPair, clock: Clock) -> dict[str, Drafter]:
    """Return new drafters, whose sequences share nothing but the composed one's evidence."""
    model = ModelDrafter(pair.draft.model, tuple(pair.draft.eos))
    lookup, recycling = prompt_lookup(Scopes()), token_recycling(Scopes())
    sources = [lookup.make_source, recycling.make_source]
    composed = ComposedDrafter(sources, model, 0, clock_ns=clock)
    return {each.info.name: each for each in (model, lookup, recycling, composed)}


class ReadPrompt(NamedTuple):
    """A prompt that both models have room for, and where it is from."""

    group: str
    place: str
    token_ids: list[int]


def read_texts(pair: MeasuredPair, found: Sequence[Group], max_tokens: int) -> list[ReadPrompt]:
    """Return the prompts that the target can continue; others are skipped and reported."""
    limit = min(pair.target.info.context_length, pair.draft.info.context_length)
    texts = []
    for group in found:
        for prompt in group.prompts:
            place = prompt.where.rpartition("/")[2]
            try:
                ids = pair.target.encode(prompt.to_request())
            except InvalidArgumentError:
                ids = [0] * limit
            if len(ids) + 2 * max_tokens > limit:  # drafts may go beyond the text
                say(f"SKIPPED {place}: it is too long")
            else:
                texts.append(ReadPrompt(group.name, place, ids))
    return texts


class SetStudy:
    """A set's prompts and the target's texts, which all methods draft."""

    def __init__(
        self,
        pair: MeasuredPair,
        name: str,
        read: Sequence[ReadPrompt],
        max_tokens: int,
        rest_ms: float,
    ) -> None:
        self._pair, self._read = pair, read
        self._prompts = [text.token_ids for text in read]
        self._texts = pair.target.continued(self._prompts, [max_tokens] * len(read))
        self._costs = [pair.costs(0.0), pair.costs(rest_ms)]
        self._found = SetRounds(name, [text.place for text in read])

    def run(self, rows: Sequence[int]) -> list[SetRounds]:
        """Simulate all methods; return the set, and its groups if it has several."""
        found, pair = self._found, self._pair
        with ExitStack() as stack:
            target, draft = (
                stack.enter_context(Reader(model, self._prompts, self._texts, width).open())
                for model, width in ((pair.target, NUM_CANDIDATES), (pair.draft, WIDTH))
            )
            for count in rows:
                began = perf_counter_ns()
                for kind in chain_drafters(pair, Clock()):
                    found.chains[SizedMethod(kind, count)] = self._chain(kind, count, target)
                best = partial(BestChains, model=draft)
                found.chains[SizedMethod(BEST_CHAIN, count)] = self._rounds(best, count, target)
                for name, tree in TREES.items():
                    make = partial(tree, model=draft)
                    found.trees[SizedMethod(name, count)] = self._rounds(make, count, target)
                say(f"{found.name}, {count} rows: {(perf_counter_ns() - began) / 1e9:.0f} s")
        labels = [text.group for text in self._read]
        parts = [
            found.part(label, [i for i, own in enumerate(labels) if own == label])
            for label in dict.fromkeys(labels)
        ]
        return [found, *(parts if len(parts) > 1 else ())]

    def _chain(self, kind: str, rows: int, target: Reader) -> list[TextTally]:
        """Return a drafter's rounds; at each of the costs, if its choices depend on them."""
        by_cost = []
        for cost in self._costs if kind == "composed" else self._costs[-1:]:
            clock = Clock()
            drafter = chain_drafters(self._pair, clock)[kind]
            make = partial(
                Chains, drafter=drafter, model=self._pair.draft.model, clock=clock, costs=cost
            )
            by_cost.append(self._rounds(make, rows, target))
        for tally, other in zip(by_cost[-1], by_cost[0], strict=True):
            tally.ns[0] = other.ns[0]
        return by_cost[-1]

    def _rounds(
        self, make: Callable[[SideBySide], DraftingMethod], rows: int, target: Reader
    ) -> list[TextTally]:
        method = make(SideBySide(self._prompts, self._texts, self._pair.target.eos))
        try:
            return simulate(method, rows, target, self._costs)
        finally:
            method.close()
