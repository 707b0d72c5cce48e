"""What trees win over chains: from the rounds of every text to tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.trees.rounds import TextTally

MS = 1e6


class SizedMethod(NamedTuple):
    """A method with a number of rows."""

    method: str
    rows: int

    def __str__(self) -> str:
        return f"{self.method}, {self.rows} rows"


@dataclass
class SetRounds:
    """Every method's rounds of a set's texts. `places` says where each text is from."""

    name: str
    places: Sequence[str]
    chains: dict[SizedMethod, list[TextTally]] = field(default_factory=dict)
    trees: dict[SizedMethod, list[TextTally]] = field(default_factory=dict)

    def part(self, name: str, indices: Sequence[int]) -> SetRounds:
        """Return some of the texts as a set of their own."""
        chains, trees = (
            {arm: [tallies[i] for i in indices] for arm, tallies in arms.items()}
            for arms in (self.chains, self.trees)
        )
        return SetRounds(name, [self.places[i] for i in indices], chains, trees)


@dataclass(frozen=True)
class ArmResult:
    """A method's rounds; tokens per ms for each of the costs that were counted."""

    set: str
    kind: str
    method: str
    rows: int
    tokens_per_round: float
    rows_per_round: float
    draft_steps_per_round: float
    tokens_per_ms: Sequence[float]


@dataclass(frozen=True)
class Gain:
    """The best tree of a set and its best chain, by one measure, and the first over the second."""

    set: str
    measure: str
    tree: str
    chain: str
    tree_value: float
    chain_value: float
    gain: float
    texts: Sequence[TextGain] = ()


@dataclass(frozen=True)
class TextGain:
    """The same tree and chain on one text."""

    place: str
    tree: float
    chain: float
    gain: float


def tokens_per_round(tallies: Sequence[TextTally]) -> float:
    return sum(t.tokens for t in tallies) / sum(t.rounds for t in tallies)


def tokens_per_ms(tallies: Sequence[TextTally], cost: int) -> float:
    return MS * sum(t.tokens for t in tallies) / sum(t.ns[cost] for t in tallies)


def results(found: SetRounds) -> list[ArmResult]:
    """Return a row for each method and number of rows."""
    kinds = [("chain", found.chains), ("tree", found.trees)]
    return [
        ArmResult(
            found.name,
            kind,
            arm.method,
            arm.rows,
            tokens_per_round(tallies),
            sum(t.rows for t in tallies) / sum(t.rounds for t in tallies),
            sum(t.draft_steps for t in tallies) / sum(t.rounds for t in tallies),
            [tokens_per_ms(tallies, cost) for cost in range(len(tallies[0].ns))],
        )
        for kind, arms in kinds
        for arm, tallies in arms.items()
    ]


def gains(found: SetRounds, rest_ms: float) -> list[Gain]:
    """Return the gain at equal rows, and at equal time without and with the rest of a round."""
    by_time = [gain_at_equal_time(found, cost, ms) for cost, ms in enumerate((0.0, rest_ms))]
    return [gain_at_equal_rows(found), *by_time]


def gain_at_equal_rows(found: SetRounds) -> Gain:
    """Return the largest gain in tokens per round that a tree has with any number of rows."""
    value = tokens_per_round
    by_rows = []
    for rows in {arm.rows for arm in found.trees}:
        tree, chain = (
            max((a for a in arms if a.rows == rows), key=lambda a: value(arms[a]))
            for arms in (found.trees, found.chains)
        )
        by_rows.append((value(found.trees[tree]) / value(found.chains[chain]), tree, chain))
    _, tree, chain = max(by_rows)
    texts = [
        TextGain(place, t := tokens_per_round([one]), c := tokens_per_round([other]), t / c - 1)
        for place, one, other in zip(
            found.places, found.trees[tree], found.chains[chain], strict=True
        )
    ]
    return _gain(
        found, "tokens/round", tree, chain, value(found.trees[tree]),
        value(found.chains[chain]), sorted(texts, key=lambda text: text.gain),
    )  # fmt: skip


def gain_at_equal_time(found: SetRounds, cost: int, rest_ms: float) -> Gain:
    """Return the gain in tokens per time, each side with its best method and number of rows."""
    (tree_value, tree), (chain_value, chain) = (
        max((tokens_per_ms(tallies, cost), arm) for arm, tallies in arms.items())
        for arms in (found.trees, found.chains)
    )
    return _gain(found, f"tokens/ms, rest {rest_ms:g} ms", tree, chain, tree_value, chain_value)


def _gain(
    found: SetRounds,
    measure: str,
    tree: SizedMethod,
    chain: SizedMethod,
    tree_value: float,
    chain_value: float,
    texts: Sequence[TextGain] = (),
) -> Gain:
    gain = tree_value / chain_value - 1
    return Gain(found.name, measure, str(tree), str(chain), tree_value, chain_value, gain, texts)
