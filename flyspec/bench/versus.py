"""One condition against another on the same prompts: answers only one got right, and looseness.

The p-value is that of McNemar's test (Psychometrika 12, 1947), exact, without approximation.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flyspec.bench.summaries import interval
from flyspec.client import Generation


@dataclass(frozen=True)
class Versus:
    """A condition against another one, `of`, on the same prompts.

    `won` counts answers that only this one got right, `lost` those that only `of` did; `mcnemar_p`
    is the probability of a difference this large if both were equally good (exact, two-sided).
    None without known answers. `loose_share_difference`, as a share of a text's tokens, is the mean
    over the prompts, with its 95 % bootstrap interval.
    """

    of: str
    won: int | None
    lost: int | None
    mcnemar_p: float | None
    loose_share_difference: float
    low: float
    high: float


def mcnemar_p(won: int, lost: int) -> float:
    """Return the exact two-sided p-value of McNemar's test: are the differences a fair coin?"""
    n = won + lost
    tail = sum(math.comb(n, i) for i in range(min(won, lost) + 1))
    return min(1.0, 2.0 * tail / float(2**n))


def compare(
    of: str,
    these: Sequence[Generation],
    those: Sequence[Generation],
    right: Sequence[bool] | None,
    right_there: Sequence[bool] | None,
) -> Versus:
    """Compare the texts of one condition with those of another, `of`, and if known the answers."""
    won = lost = None
    if right is not None and right_there is not None:
        pairs = list(zip(right, right_there, strict=True))
        won, lost = pairs.count((True, False)), pairs.count((False, True))
    shares = [
        [g.completion.speculation.num_loose_tokens / max(1, len(g.token_ids)) for g in generations]
        for generations in (these, those)
    ]
    differences = [here - there for here, there in zip(*shares, strict=True)]
    return Versus(
        of,
        won,
        lost,
        None if won is None or lost is None else mcnemar_p(won, lost),
        statistics.mean(differences),
        *interval(differences, np.mean),
    )
