"""Statistics of samples: groups, medians, intervals and tests. Pure functions.

The same problems are answered under every condition, so conditions are compared problem by problem,
and all resamples draw whole problems with everything that was measured on them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest, norm

Array = NDArray[np.float64]
K = TypeVar("K")
V = TypeVar("V")

CONFIDENCE = 0.95
RESAMPLES = 10_000
POINT = 0.01
"""A difference of one percentage point."""


def grouped(values: Iterable[V], key: Callable[[V], K]) -> dict[K, list[V]]:
    """Return the values by key, in the order of the keys' first appearance."""
    found: dict[K, list[V]] = defaultdict(list)
    for value in values:
        found[key(value)].append(value)
    return dict(found)


def median_or_none(values: Iterable[float]) -> float | None:
    """Return the median of the finite values, if there are any."""
    known = [value for value in values if math.isfinite(value)]
    return float(np.median(known)) if known else None


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the median; seeded."""
    rng = np.random.default_rng(0)
    drawn = np.asarray(values)[rng.integers(len(values), size=(RESAMPLES, len(values)))]
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    return float(low), float(high)


@dataclass(frozen=True)
class Interval:
    """An estimate and its two-sided 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Flips:
    """Answers of a condition against those of another on the same problems.

    `harmful`: right there, wrong here; `helpful`: wrong there, right here. `right_there` of them
    were right there. `harmful_rate_upper` is the exact one-sided 95 % bound of the share of harmful
    ones, so that recovery is at least 1 - `harmful_rate_upper` with that confidence, whatever is
    gained elsewhere. `mcnemar_p`: see there.
    """

    harmful: int
    helpful: int
    right_there: int
    problems: int
    harmful_rate_upper: float
    mcnemar_p: float

    @classmethod
    def of(cls, right: NDArray[np.bool_], right_there: NDArray[np.bool_]) -> Flips:
        """Compare right answers [problems] with those of the other condition, in the same order."""
        harmful, helpful = int((~right & right_there).sum()), int((right & ~right_there).sum())
        count = int(right_there.sum())
        upper = upper_bound(harmful, count)
        return cls(harmful, helpful, count, len(right), upper, mcnemar_p(helpful, harmful))


def is_larger(one: Interval | None, other: Interval | None) -> bool | None:
    """Return whether the first is, None if the intervals leave it open or one is unknown."""
    if one is None or other is None:
        return None
    if one.low > other.high:
        return True
    return False if one.high < other.low else None


def mcnemar_p(won: int, lost: int) -> float:
    """Return the exact two-sided p-value of McNemar's test: are the differences a fair coin?

    Q. McNemar, Psychometrika 12 (1947), with the binomial distribution instead of its limit.
    """
    return float(binomtest(won, won + lost).pvalue) if won + lost else 1.0


def wins_more(won: int, lost: int) -> bool | None:
    """Return whether more is won than lost; None if the difference may be chance (`mcnemar_p`)."""
    return won > lost if mcnemar_p(won, lost) <= 1 - CONFIDENCE else None


def exact_interval(count: int, of: int) -> tuple[float, float]:
    """Return the two-sided exact interval of a share (Clopper and Pearson, Biometrika 26, 1934)."""
    if of == 0:
        return 0.0, 1.0
    found = binomtest(count, of).proportion_ci(CONFIDENCE, method="exact")
    return float(found.low), float(found.high)


def upper_bound(count: int, of: int) -> float:
    """Return the one-sided exact upper bound of a share; for a count of 0 about 3 / `of`."""
    if of == 0:
        return 1.0
    test = binomtest(count, of, alternative="less")
    return float(test.proportion_ci(CONFIDENCE, method="exact").high)


class PairedBootstrap:
    """Resamples of `num_problems` problems, the same for everything that is asked of them.

    A statistic is a function of sums over the problems: it gets an array [..., columns] of sums and
    returns one of [...]. Seeded, so that a report of the same samples is the same.
    """

    def __init__(self, num_problems: int, resamples: int = RESAMPLES) -> None:
        self._size, self._resamples = num_problems, resamples

    @cached_property
    def _counts(self) -> NDArray[np.uint16]:
        """Counts of each problem in each resample, [resamples, problems]."""
        rng, size = np.random.default_rng(0), self._size
        counts = np.empty((self._resamples, size), np.uint16)
        for row in counts:
            row[:] = np.bincount(rng.integers(size, size=size), minlength=size)
        return counts

    def sums(self, values: Array) -> Array:
        """Return the sums of values [problems, columns] in each resample, [resamples, columns]."""
        # In parts, so that memory stays small.
        return np.concatenate([counts @ values for counts in np.array_split(self._counts, 40)])

    def interval(
        self,
        values: Array,
        statistic: Callable[[Array], Any],
        method: Literal["BCa", "percentile"] = "BCa",
    ) -> Interval | None:
        """Return a statistic of the sums of values [problems, columns], with its intervals.

        BCa (bias-corrected and accelerated) is that of B. Efron, JASA 82 (1987); its acceleration
        is from the jackknife. Resamples in which the statistic is undefined (NaN, infinite) are
        left out. None if it is undefined for the values themselves, or for most resamples.
        """
        total = values.sum(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            value = float(statistic(total))
            drawn = np.asarray(statistic(self.sums(values)), float)
            without = np.asarray(statistic(total - values), float)
        drawn = drawn[np.isfinite(drawn)]
        if not np.isfinite(value) or len(drawn) < self._resamples / 2:
            return None
        probabilities = np.array([(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        if method == "BCa":
            probabilities = _corrected(probabilities, drawn, value, without[np.isfinite(without)])
        low, high = np.quantile(drawn, probabilities)
        return Interval(value, float(low), float(high))


def _corrected(probabilities: Array, drawn: Array, value: float, without: Array) -> Array:
    """Return the probabilities of BCa; as they are where the correction is undefined."""
    if not without.size:  # of a single problem
        return probabilities
    below = (np.mean(drawn < value) + np.mean(drawn <= value)) / 2
    deviation = without.mean() - without
    spread = np.sum(deviation**2) ** 1.5
    if not 0 < below < 1 or spread == 0:
        return probabilities
    bias, acceleration = norm.ppf(below), np.sum(deviation**3) / (6 * spread)
    shifted = bias + norm.ppf(probabilities)
    return np.asarray(norm.cdf(bias + shifted / (1 - acceleration * shifted)))


def ratio(sums: Array) -> Any:
    """Return the first column's sum over the second's: a recovery, a share, a speed."""
    return sums[..., 0] / sums[..., 1]
