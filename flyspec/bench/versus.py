"""One condition against another on the same prompts: what only one got right, and how loose.

The p-value is that of McNemar's test (Psychometrika 12, 1947), exact: without an approximation.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flyspec.bench.intervals import interval
from flyspec.client import Generation


@dataclass(frozen=True)
class Versus:
    """A condition against another one, `of`, on the same prompts.

    `lost` counts what `of` alone got right and `won` what it alone got wrong; `mcnemar_p` is how
    likely they would differ by as much if both were as good (exact, two-sided). None without known
    answers. `loose_share_difference`, of a text's tokens, is the mean over the prompts, with the
    95 % interval of the bootstrap over them.
    """

    of: str
    won: int | None
    lost: int | None
    mcnemar_p: float | None
    loose_share_difference: float
    low: float
    high: float


def mcnemar_p(won: int, lost: int) -> float:
    """The exact two-sided p-value of McNemar's test: a fair coin for what only one got right."""
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
    """Texts of one condition with those of another, `of`, and if known what each got right."""
    won = lost = None
    if right is not None and right_there is not None:
        won = sum(here and not there for here, there in zip(right, right_there, strict=True))
        lost = sum(there and not here for here, there in zip(right, right_there, strict=True))
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
