"""Rules against each other where they cost the same.

A rule's thresholds are points of quality over speed. They make a curve, which begins at `exact`,
the limit of every rule: what lies between two points is what choosing at random between the two, a
request at a time, would give.

Sending each problem to a small model with some probability, and else to the large one, trades
quality for speed as well. A rule is worth its name only above the straight line between the two
(the line that Fuzzy Speculative Decoding, arXiv 2502.20704, has to beat). The line is generous to
the allocation: mixing adds times, not speeds, so what it really gives bends below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flyspec.rules import PARAMETERS, Rule
from flyspec.rules.presets import RULE_PRESETS
from flyspec_lab.answered import ROUNDS, TIME, Answered
from flyspec_lab.arms import Arm
from flyspec_lab.bench.conditions import PLAIN
from flyspec_lab.statistics import Array, PairedBootstrap, grouped

_WINDOW = "fly_window_size"


@dataclass(frozen=True)
class AtEqualSpeed:
    """Quality of a condition less that of another rule's curve at the same speed, with its 95 %
    interval."""

    speed: float
    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class EqualCost:
    """A condition against the curve of another rule, where both have the same tokens per round
    (`acceptance`) and the same tokens per second (`speed`). None where the curve does not reach.

    A random allocation (`allocation_from`) is a curve in tokens per second only."""

    task: str
    condition: str
    of: str
    acceptance: AtEqualSpeed | None
    speed: AtEqualSpeed | None


def equal_costs(answered: Answered) -> list[EqualCost]:
    """Compare each lossy condition with the curves of other rules, `random` first.

    A curve has two or more conditions of a rule (`curves_of`), or is `random`; and `exact` if that
    was compared, which every rule becomes where it accepts nothing. Last are the lines of a random
    allocation, from plain and from exact decoding (with the same K and drafter) to the rival; where
    a condition is faster than that one, its score counts.
    """
    if not answered.has_answers:
        return []
    found = []
    for arm in answered.arms:
        for name, members in _curves(answered.arms).items():
            if arm.rival or arm in members or is_exact(arm) or is_control(arm):
                continue
            rounds, time = (_at_equal_speed(answered, arm, members, by) for by in (ROUNDS, TIME))
            if rounds or time:
                found.append(EqualCost(answered.task, arm.name, name, rounds, time))
    return [*found, *_allocations(answered)]


def allocation_from(large: str) -> str:
    """Return the name of the line from a large model's condition to the rival."""
    return f"random allocation from {large}"


def _at_equal_speed(
    answered: Answered, arm: Arm, curve: Sequence[Arm], by: str, beyond: bool = False
) -> AtEqualSpeed | None:
    assert answered.bootstrap is not None
    return at_equal_speed(
        answered.bootstrap, answered.curve([arm], by), answered.curve(curve, by), beyond
    )


def _allocations(answered: Answered) -> list[EqualCost]:
    small = next((arm for arm in answered.arms if arm.rival), None)
    if small is None:
        return []
    return [
        EqualCost(
            answered.task, arm.name, allocation_from(large.name), None,
            _at_equal_speed(answered, arm, [large, small], TIME, beyond=True),
        )
        for arm in answered.arms
        if not arm.rival and not is_exact(arm)
        for large in answered.arms
        if large.name == PLAIN
        or (is_exact(large) and (large.k, large.drafter) == (arm.k, arm.drafter))
    ]  # fmt: skip


def curves_of(arms: Sequence[Arm]) -> dict[str, list[Arm]]:
    """Return the arms that differ in their thresholds only, by what they have in common.

    That is the rule with its kinds of measures and its window, K and drafter; the name says what
    others differ in. Conditions with phases are by themselves; plain decoding and rivals are left
    out.
    """
    drafting = [arm for arm in arms if arm.k != 0 and not arm.rival]
    of_rule = grouped((arm.rule for arm in drafting), lambda rule: rule.name)
    lengths = len({arm.k for arm in drafting}) > 1
    drafters = len({arm.drafter for arm in drafting}) > 1

    def name(arm: Arm) -> str:
        if arm.condition.phases:
            return arm.name
        parts = [arm.rule.name, *_own_kinds(arm.rule, of_rule[arm.rule.name])]
        if lengths:
            parts.append(f"K = {'auto' if arm.k is None else arm.k}")
        if drafters:
            parts.append(arm.drafter)
        return ", ".join(parts)

    return grouped(drafting, name)


def _own_kinds(rule: Rule, rules: Sequence[Rule]) -> list[str]:
    """Return the rule's kinds of measures and window, where the others' are not all the same."""
    return [
        f"W = {value}" if name == _WINDOW else parameter.show(value)
        for name, parameter in PARAMETERS.items()
        if (parameter.members or name == _WINDOW)
        and (value := getattr(rule, name)) is not None
        and len({getattr(other, name) for other in rules}) > 1
    ]


def _curves(arms: Sequence[Arm]) -> dict[str, list[Arm]]:
    """Return the curves to compare with, beginning at `exact`; `random` first."""
    exact = {(arm.k, arm.drafter): arm for arm in arms if is_exact(arm) and arm.k != 0}
    found = {}
    for name, members in curves_of(arms).items():
        start = exact.get((members[0].k, members[0].drafter))
        if is_exact(members[0]) or (len(members) < 2 and not is_control(members[0])):
            continue
        points = members if start is None else [start, *members]
        if len(points) > 1:
            found[name] = points
    return dict(sorted(found.items(), key=lambda item: not is_control(item[1][-1])))


def is_exact(arm: Arm) -> bool:
    """True if its rule is lossless token by token, as that of plain decoding is."""
    preset = RULE_PRESETS.get(arm.rule.name)
    return preset is not None and preset.token_exact and not arm.condition.phases


def is_control(arm: Arm) -> bool:
    """True if it accepts at random, as what other rules have to be better than."""
    return arm.rule.name == "random" and not arm.condition.phases


def at_equal_speed(
    bootstrap: PairedBootstrap, point: Array, curve: Array, beyond: bool = False
) -> AtEqualSpeed | None:
    """Compare `point`, a curve of one condition, with a curve of two or more, resampling problems.

    Curves are as `Answered.curve` has them. None where the curve does not reach the point's speed;
    with `beyond`, a point that is faster than the whole curve is compared with its fastest end.
    Where a resample's point lies beyond its curve, the curve's end counts.
    """
    values = np.concatenate([point, curve], axis=1)
    speed, speeds = _speeds(values.sum(axis=0))
    if speed < speeds.min() or (speed > speeds.max() and not beyond):
        return None
    found = bootstrap.interval(values, lambda sums: _difference(sums, len(values)), "percentile")
    if found is None:
        return None
    return AtEqualSpeed(float(speed), found.value, found.low, found.high)


def _speeds(sums: Array) -> tuple[Array, Array]:
    """Return the point's speed [...] and those of the curve [..., conditions]."""
    gained, spent, _ = np.split(sums[..., 3:], 3, axis=-1)
    return sums[..., 0] / sums[..., 1], gained / spent


def _difference(sums: Array, problems: int) -> Array:
    """Return the difference in each row of sums [..., columns]."""
    quality = _on_lines(*_speeds(sums), np.split(sums[..., 3:], 3, axis=-1)[2])
    return np.asarray((sums[..., 2] - quality) / problems)


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
