"""What is computed of measured times: percentiles, shares, growth, the knee. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Protocol


def percentile(values: Sequence[float], share: float) -> float:
    """The value that a share of `values`, in [0, 1], does not exceed; NaN of none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1))]


def quantiles(values: Sequence[float], points: int = 100) -> list[float]:
    """`points` + 1 percentiles at even shares, the least and the greatest included; none of none.

    The empirical distribution as a line of fixed length, for plots.
    """
    ordered = sorted(values)
    last = len(ordered) - 1
    return [ordered[round(i * last / points)] for i in range(points + 1)] if ordered else []


def growth(values: Sequence[float]) -> float | None:
    """How much a series grew: median of its last third over that of its middle third, less 1.

    The first third is its warm-up. None of fewer than three values.
    """
    third = len(values) // 3
    if not third:
        return None
    middle = statistics.median(values[third : 2 * third])
    return statistics.median(values[-third:]) / middle - 1 if middle else None


def overlap(begin: float, end: float, first: float, last: float) -> float:
    """The share of [first, last] that lies in [begin, end]; of a single moment, 1 or 0."""
    if last <= first:
        return 1.0 if begin <= first < end else 0.0
    return max(0.0, min(end, last) - max(begin, first)) / (last - first)


class Point(Protocol):
    """A step of a load: how much came out a second, and how long a request took."""

    @property
    def rate(self) -> float:
        """Throughput; any unit."""

    @property
    def latency(self) -> float:
        """Mean latency of a request, s; NaN if none was completed."""


def knee(points: Sequence[Point]) -> int | None:
    """The index of the point with the most throughput for its latency (Kleinrock's power).

    Up to there throughput grows faster than latency, relatively; from there on slower. None if
    nothing was completed anywhere, or the last point is the best: more load may be better still.
    """
    power = [p.rate / p.latency if p.latency > 0 else -1.0 for p in points]
    best = max(power, default=-1.0)
    at = power.index(best) if best > 0 else len(power) - 1
    return at if at < len(power) - 1 else None
