"""Thresholds of divergences at which a rule is as fast as exact speculation, and what it keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from flyspec.rules.presets import RULE_PRESETS
from flyspec.tables import FittedTable, make_table
from flyspec_lab.answered import ROUNDS, TIME, Answered
from flyspec_lab.arms import Arm
from flyspec_lab.bench.conditions import PLAIN
from flyspec_lab.curves import EqualSpeedThreshold, equal_speed_threshold
from flyspec_lab.statistics import Interval

_UNITS = {ROUNDS: ("round", 1.0), TIME: ("second", 1e9)}


class ThresholdRow(NamedTuple):
    """A rule with a divergence, at the speed of `base` counted in tokens per `by`.

    `found` is over all texts, `trials` of each trial; None where the rule is slower.
    """

    name: str
    by: str
    base: str
    found: EqualSpeedThreshold | None
    trials: Sequence[EqualSpeedThreshold | None]


def exact_speculation(arms: Sequence[Arm]) -> Arm:
    """Return what speed is compared with: speculation that keeps the target's distribution.

    Sampled texts have speculative sampling, which is what the paper compares with.
    """
    lossless = [arm for arm in arms if arm.k != 0 and RULE_PRESETS[arm.rule.name].lossless]
    return lossless[0]


def threshold_rows(answered: Answered, trials: int) -> list[ThresholdRow]:
    """Return T* of each rule and divergence, by tokens per round and per second.

    `trials` is into how many the problems are divided.
    """
    base = exact_speculation(answered.arms)
    parts = [answered, *answered.trials(trials)]
    rows = []
    for name, arms in _families(answered.arms):
        thresholds = [arm.rule.divergence_threshold or 0.0 for arm in arms]
        for by in (ROUNDS, TIME):
            whole, *others = (_threshold(part, base, arms, thresholds, by) for part in parts)
            rows.append(ThresholdRow(name, by, base.name, whole, others))
    return rows


def _families(arms: Sequence[Arm]) -> Iterator[tuple[str, list[Arm]]]:
    """Yield the arms that differ in T alone, strictest first, by rule and divergence."""
    found: dict[str, list[Arm]] = {}
    for arm in arms:
        if arm.rule.divergence_threshold is not None and arm.rule.divergence is not None:
            found.setdefault(f"{arm.rule.name} {arm.rule.divergence.name}", []).append(arm)
    for name, of in found.items():
        if len(of) > 1:
            yield name, sorted(of, key=lambda arm: arm.rule.divergence_threshold or 0.0)


def _threshold(
    part: Answered, base: Arm, arms: Sequence[Arm], thresholds: Sequence[float], by: str
) -> EqualSpeedThreshold | None:
    assert part.bootstrap is not None
    plain = next(arm for arm in part.arms if arm.name == PLAIN)
    quality = part.curve([plain], by)[:, 2]
    return equal_speed_threshold(
        part.bootstrap, part.curve([base], by), part.curve(arms, by), thresholds, quality
    )


def threshold_table(rows: Sequence[ThresholdRow]) -> FittedTable:
    columns = ["rule", "tokens per", "exact", "T*", "trials", "recovery", "95 %", "trials"]
    columns += ["score - exact", "95 %"]
    shown = [_threshold_cells(row) for row in rows]
    return make_table(columns, shown, "thresholds as fast as exact speculation", left=2)


def _threshold_cells(row: ThresholdRow) -> list[str]:
    if row.found is None:
        return [row.name, _UNITS[row.by][0], *["-"] * 2, ", ".join(map(_t, row.trials)), *["-"] * 5]
    recovery, difference = row.found.recovery, row.found.difference
    name, scale = _UNITS[row.by]
    return [
        row.name,
        name,
        f"{row.found.speed * scale:.4g}",
        _t(row.found),
        ", ".join(map(_t, row.trials)),
        *_cells(recovery, "{:.1%}"),
        _spread([t.recovery for t in row.trials if t is not None]),
        *_cells(difference, "{:+.1%}"),
    ]


def _t(found: EqualSpeedThreshold | None) -> str:
    if found is None:
        return "-"
    return f"{'≤ ' if found.all_faster else ''}{found.threshold:.2g}"


def _cells(value: Interval | None, form: str) -> list[str]:
    if value is None:
        return ["-", "-"]
    shown = [form.format(part) for part in (value.value, value.low, value.high)]
    return [shown[0], f"{shown[1]} to {shown[2]}"]


def _spread(values: Sequence[Interval | None]) -> str:
    """Show the mean and the standard deviation of trials."""
    known = [value.value for value in values if value is not None]
    if len(known) < 2:
        return "-"
    return f"{np.mean(known):.1%} ± {np.std(known, ddof=1):.1%}"
