"""Summaries of samples: groups, medians, distributions, confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

K = TypeVar("K")
V = TypeVar("V")

RESAMPLES = 2000


def grouped(values: Iterable[V], key: Callable[[V], K]) -> dict[K, list[V]]:
    """Return the values by key, in the order of the keys' first appearance."""
    found: dict[K, list[V]] = defaultdict(list)
    for value in values:
        found[key(value)].append(value)
    return dict(found)


def median_or_none(values: Iterable[float]) -> float | None:
    """Return the median of the finite values, if there are any."""
    known = [value for value in values if math.isfinite(value)]
    return float(statistics.median(known)) if known else None


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the median; seeded."""
    rng = np.random.default_rng(0)
    drawn = np.asarray(values)[rng.integers(len(values), size=(RESAMPLES, len(values)))]
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    return float(low), float(high)
