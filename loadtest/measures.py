"""Percentiles, shares and the knee of measured times, and how numbers are written. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """The value that a share of `values`, in [0, 1], does not exceed; NaN if there are none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1))]


def quantiles(values: Sequence[float], points: int = 100) -> list[float]:
    """`points` + 1 percentiles at even shares, minimum and maximum included; empty if no values.

    The empirical distribution as a line of fixed length, for plots.
    """
    ordered = sorted(values)
    last = len(ordered) - 1
    return [ordered[round(i * last / points)] for i in range(points + 1)] if ordered else []


def overlap(begin: float, end: float, first: float, last: float) -> float:
    """The share of [first, last] that lies in [begin, end]; of a single moment, 1 or 0."""
    if last <= first:
        return 1.0 if begin <= first < end else 0.0
    return max(0.0, min(end, last) - max(begin, first)) / (last - first)


def knee(points: Sequence[tuple[float, float]]) -> int | None:
    """The index of the step of load with the highest throughput over latency (Kleinrock's power).

    Each point is a throughput and a mean latency (NaN if nothing completed), in any units. Up to
    the knee throughput grows faster than latency, relatively; beyond it more slowly. None if
    nothing completed, or if the last point is the best: more load may be better still.
    """
    power = [rate / latency if latency > 0 else -1.0 for rate, latency in points]
    best = max(power, default=-1.0)
    at = power.index(best) if best > 0 else len(power) - 1
    return at if at < len(power) - 1 else None


def number(value: float | None) -> str:
    """Write a number with about three digits; a dash if there is none."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def duration(ms: float | None) -> str:
    """Write a time in ms, or in s from one second on; a dash if there is none."""
    if ms is None or not math.isfinite(ms):
        return "–"
    if ms >= 1000:
        return f"{ms / 1000:.2f} s" if ms < 100_000 else f"{ms / 1000:.0f} s"
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.1f} ms"
