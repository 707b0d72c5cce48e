"""Rules against each other where they cost the same: fronts, and curves at equal speed.

A rule's thresholds are points of quality over speed. They make a curve, which begins at `exact`,
the limit of every rule: what lies between two points is what choosing at random between the two, a
request at a time, would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flyspec_lab.statistics import Array, Interval, PairedBootstrap


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


def at_equal_speed(
    bootstrap: PairedBootstrap, point: Curve, curve: Curve, beyond: bool = False
) -> AtEqualSpeed | None:
    """Compare `point`, a curve of one condition, with a curve of two or more, resampling problems.

    With `beyond`, a point that is faster than the whole curve is compared with its fastest end.
    Where a resample's point lies beyond its curve, the curve's end counts.
    """
    values = np.concatenate([point.columns, curve.columns], axis=1)
    speed, speeds = _speeds(values.sum(axis=0))
    if speed < speeds.min() or (speed > speeds.max() and not beyond):
        return None
    found = bootstrap.interval(values, lambda sums: _difference(sums, len(values)), "percentile")
    if found is None:
        return None
    return AtEqualSpeed(float(speed), found.value, found.low, found.high)


@dataclass(frozen=True)
class EqualSpeedThreshold:
    """Where a rule's threshold makes it as fast as another condition, and what is kept there.

    `speed` is the other condition's. `threshold` lies on the line between two that were tried; if
    all of these are faster (`all_faster`), it is that of the slowest. `recovery` is the score there
    relative to plain decoding's, `difference` the score less the other condition's, with 95 %
    intervals for which each resample finds its own threshold.
    """

    speed: float
    threshold: float
    all_faster: bool
    recovery: Interval | None
    difference: Interval | None


def equal_speed_threshold(
    bootstrap: PairedBootstrap,
    base: Curve,
    curve: Curve,
    thresholds: Sequence[float],
    plain_quality: Array,
) -> EqualSpeedThreshold | None:
    """Return the threshold at which `curve` is as fast as `base`, a curve of one condition.

    None if it is slower everywhere. `curve` has a condition for each of `thresholds`;
    `plain_quality` [problems] is plain decoding's.
    """
    values = np.concatenate([base.columns, curve.columns], axis=1)
    speed, speeds = _speeds(values.sum(axis=0))
    if speed > speeds.max():
        return None
    count = len(values)
    return EqualSpeedThreshold(
        float(speed),
        float(_on_lines(speed, speeds, np.asarray(thresholds, float))),
        bool(speed < speeds.min()),
        bootstrap.interval(
            np.concatenate([values, plain_quality[:, None]], axis=1),
            lambda sums: _quality_at_speed(sums[..., :-1]) / sums[..., -1],
            "percentile",
        ),
        bootstrap.interval(values, lambda sums: 0.0 - _difference(sums, count), "percentile"),
    )


def _speeds(sums: Array) -> tuple[Array, Array]:
    """Return the point's speed [...] and those of the curve [..., conditions]."""
    gained, spent, _ = np.split(sums[..., 3:], 3, axis=-1)
    return sums[..., 0] / sums[..., 1], gained / spent


def _quality_at_speed(sums: Array) -> Array:
    """Return the quality of the curve where it is as fast as the point."""
    return _on_lines(*_speeds(sums), np.split(sums[..., 3:], 3, axis=-1)[2])


def _difference(sums: Array, problems: int) -> Array:
    """Return the difference in each row of sums [..., columns]."""
    return np.asarray((sums[..., 2] - _quality_at_speed(sums)) / problems)


def _on_lines(x: Array, xs: Array, ys: Array) -> Array:
    """Interpolate at x [...] between points [..., n], in any order; beyond them, the ends count.

    As `np.interp` does, whose points cannot differ by row.
    """
    order = np.argsort(xs, axis=-1, kind="stable")
    xs, ys = np.take_along_axis(xs, order, axis=-1), np.take_along_axis(ys, order, axis=-1)
    after = np.clip((xs < x[..., None]).sum(axis=-1), 1, xs.shape[-1] - 1)[..., None]
    low, high = (np.take_along_axis(xs, i, axis=-1)[..., 0] for i in (after - 1, after))
    start, end = (np.take_along_axis(ys, i, axis=-1)[..., 0] for i in (after - 1, after))
    part = np.clip((x - low) / np.where(high > low, high - low, 1.0), 0.0, 1.0)
    return np.asarray(start + part * (end - start))
