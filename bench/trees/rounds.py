"""Rounds of exact verification along the target's own texts: how many tokens each brings.

Greedy and exact, drafts are accepted as far as they equal the target's text, so that the text is
all there is to know of the target, except for what it says after rejected drafts: recycling learns
from that too, as it does from verdicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.trees.drafting import DraftingMethod, RoundCosts, SideBySide
from bench.trees.reading import Reader
from bench.trees.selection import Drafts, leaves, num_followed
from flyspec.prefix import num_same
from flyspec.values.rounds import TopTokens


@dataclass
class TextTally:
    """Rounds of one text."""

    tokens: int = 0
    rounds: int = 0
    rows: int = 0
    draft_steps: int = 0
    ns: list[float] = field(default_factory=list)
    """Time by each of the costs."""

    def add(self, count: int, drafts: Drafts, costs: Sequence[RoundCosts]) -> None:
        self.tokens += count
        self.rounds += 1
        self.rows += 1 + len(drafts.paths)
        self.draft_steps += len(drafts.draft_steps)
        self.ns = [
            ns + cost(drafts) for ns, cost in zip(self.ns or [0.0] * len(costs), costs, strict=True)
        ]


def simulate(
    method: DraftingMethod, num_rows: int, target: Reader, costs: Sequence[RoundCosts]
) -> list[TextTally]:
    """Run every text of the method's batch to its end, with at most `num_rows` rows a round."""
    batch, learns = method.batch, method.learns
    tallies = [TextTally() for _ in batch.texts]
    while indices := batch.unfinished:
        proposed = dict(zip(indices, method.propose(indices, num_rows - 1), strict=True))
        if learns:
            target.load(
                (i, batch.done[i], path)
                for i, drafts in proposed.items()
                for path in leaves(drafts.paths)
            )
        for index, drafts in proposed.items():
            left = batch.texts[index][batch.done[index] :]
            accepted = num_followed(set(drafts.paths), left)
            new = left[: accepted + 1]
            tops = verdict(target, batch, index, drafts, new) if learns else []
            method.learn(index, drafts, tops, new)
            batch.done[index] += len(new)
            tallies[index].add(len(new), drafts, costs)
    return tallies


def verdict(
    target: Reader, batch: SideBySide, index: int, drafts: Drafts, new: Sequence[int]
) -> list[TopTokens]:
    """Return the target's candidates after every row, path by path; the accepted one comes last.

    None without drafts, as in the protocol.
    """
    last, done = batch.sequence(index)[-2:], batch.done[index]
    tops = []
    for path in sorted(leaves(drafts.paths), key=lambda path: num_same(path, new)):
        rows = [target.after(index, done, path[:length]) for length in range(len(path) + 1)]
        tops.append(TopTokens([*last, *path], [token for row in rows for token in row.token_ids]))
    return tops
