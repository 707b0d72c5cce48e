"""Rules against each other where they cost the same: fronts, and curves at equal speed.

A rule's thresholds are points of quality over speed. They make a curve, which begins at `exact`,
the limit of every rule: what lies between two points is what choosing at random between the two, a
request at a time, would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flyspec.lab.statistics import Array, PairedBootstrap


@dataclass(frozen=True)
class Curve:
    """Conditions of one rule on the same problems, in any order.

    All are sums per problem, [problems, conditions]: `speed` is `gained` over `spent`, such as
    tokens over rounds; quality is the mean of `quality`.
    """

    gained: Array
    spent: Array
    quality: Array

    @property
    def columns(self) -> Array:
        """Everything that is resampled, [problems, 3 x conditions]."""
        return np.concatenate([self.gained, self.spent, self.quality], axis=1)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of points (speed, quality) that no other beats, slowest first.

    A point is beaten by one that is better in one and no worse in the other.
    """
    front: list[int] = []
    best = -np.inf
    for index in sorted(range(len(points)), key=lambda i: points[i], reverse=True):
        if points[index][1] > best:
            best = points[index][1]
            front.append(index)
    return front[::-1]


@dataclass(frozen=True)
class AtEqualSpeed:
    """Quality of a condition less that of another rule's curve at the same speed, with its 95 %
    interval. None: the curve does not reach this speed."""

    speed: float
    difference: float
    low: float
    high: float


def at_equal_speed(bootstrap: PairedBootstrap, point: Curve, curve: Curve) -> AtEqualSpeed | None:
    """Compare `point`, a curve of one condition, with a curve of two or more, resampling problems.

    Where a resample's point lies beyond its curve, the curve's end counts.
    """
    values = np.concatenate([point.columns, curve.columns], axis=1)
    total = values.sum(axis=0)
    speed, (lowest, highest) = _speed(total), _range(total)
    if not lowest <= speed <= highest:
        return None
    found = bootstrap.interval(values, lambda sums: _difference(sums, len(values)), "percentile")
    return None if found is None else AtEqualSpeed(speed, found.value, found.low, found.high)


def _speed(sums: Array) -> float:
    return float(sums[0] / sums[1])


def _range(sums: Array) -> tuple[float, float]:
    gained, spent, _ = sums[3:].reshape(3, -1)
    speeds = gained / spent
    return float(speeds.min()), float(speeds.max())


def _difference(sums: Array, problems: int) -> Array:
    """Return the difference in each row of sums [..., columns]."""
    x = sums[..., 0] / sums[..., 1]
    gained, spent, quality = np.split(sums[..., 3:], 3, axis=-1)
    order = np.argsort(gained / spent, axis=-1, kind="stable")
    speeds = np.take_along_axis(gained / spent, order, axis=-1)
    quality = np.take_along_axis(quality, order, axis=-1)
    # Linear interpolation, as `np.interp` does, whose points cannot differ by row.
    after = np.clip((speeds < x[..., None]).sum(axis=-1), 1, speeds.shape[-1] - 1)[..., None]
    low, high = (np.take_along_axis(speeds, i, axis=-1)[..., 0] for i in (after - 1, after))
    start, end = (np.take_along_axis(quality, i, axis=-1)[..., 0] for i in (after - 1, after))
    part = np.clip((x - low) / np.where(high > low, high - low, 1.0), 0.0, 1.0)
    return np.asarray((sums[..., 2] - start - part * (end - start)) / problems)
