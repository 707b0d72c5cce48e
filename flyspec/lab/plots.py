"""Plots of `flyspec eval`: quality against what speculation gains, with the Pareto front."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyspec.bench.conditions import PLAIN
from flyspec.drawing import GREY, powers_of_two, save
from flyspec.lab.arms import Arm
from flyspec.lab.compare import ConditionReport
from flyspec.lab.curves import curves_of, is_control
from flyspec.lab.frontier import pareto_front
from flyspec.lab.statistics import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colors, told apart by the color-blind, without black and yellow.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
MARKERS = "os^Dv<>p"
_WIDE = 4.0
"""Speeds that differ by more than this are shown on a logarithmic axis."""
_PANEL_INCHES = (5.6, 4.2)


def plot_quality(
    path: Path, arms: Sequence[Arm], reports: Mapping[str, Sequence[ConditionReport]]
) -> None:
    """Draw a row of two plots for each task: against tokens per round, and against speed."""
    tasks = [name for name, of in reports.items() if of]
    width, height = _PANEL_INCHES
    inches = (2 * width, height * max(1, len(tasks)))
    save(path, inches, lambda figure: draw_quality(figure, arms, reports))


def draw_quality(
    figure: Figure, arms: Sequence[Arm], reports: Mapping[str, Sequence[ConditionReport]]
) -> None:
    """Draw them into a figure."""
    tasks = [name for name, of in reports.items() if of]
    axes = figure.subplots(len(tasks), 2, squeeze=False, sharey="row")
    for (left, right), name in zip(axes, tasks, strict=True):
        of = {r.condition: r for r in reports[name]}
        _panel(left, arms, of, _accepted, "tokens per round")
        _panel(right, arms, of, _speed, _speed_label(of))
        left.set_ylabel(_quality_label(of))
        left.set_title(f"{name}, {next(iter(of.values())).problems} problems", loc="left")
        right.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


Measured = Callable[[ConditionReport], Interval | None]


def _accepted(r: ConditionReport) -> Interval | None:
    return r.mean_accepted_tokens_interval


def _speed(r: ConditionReport) -> Interval | None:
    return r.speed_ratio or Interval(1.0, 1.0, 1.0, 1.0)


def _speed_label(of: Mapping[str, ConditionReport]) -> str:
    bases = dict.fromkeys(r.speed_base for r in of.values() if r.speed_base not in (None, PLAIN))
    return f"tokens per second, relative to {'exact' if bases else PLAIN}"


def _quality_label(of: Mapping[str, ConditionReport]) -> str:
    if any(r.recovery for r in of.values()):
        return "recovery, 95 % interval"
    return "log p per token, nats"


def _quality(r: ConditionReport) -> Interval | None:
    if r.recovery is not None:
        return r.recovery
    value = r.log_likelihood_per_token
    return None if value is None else Interval(value, value, value, value)


def _panel(
    ax: Axes, arms: Sequence[Arm], of: Mapping[str, ConditionReport], across: Measured, label: str
) -> None:
    """Draw each rule's conditions in one color, joined in the order of `across`; and the front."""
    points: list[tuple[float, float]] = []
    colors = iter(COLORS * len(arms))
    markers = iter(MARKERS * len(arms))
    others: dict[str, list[Arm]] = {}
    if across is not _accepted:  # they have a token per round
        others = {arm.name: [arm] for arm in arms if arm.k == 0}
    for name, members in {**curves_of(arms), **others}.items():
        drawn = [
            (x, y, of[arm.name].condition)
            for arm in members
            if arm.name in of
            and (x := across(of[arm.name])) is not None
            and (y := _quality(of[arm.name])) is not None
        ]
        if not drawn:
            continue
        drawn.sort(key=lambda point: point[0].value)
        control = name in others or is_control(members[0])
        style: dict[str, Any] = {
            "color": GREY if control else next(colors),
            "linestyle": ":" if control else "-",
            "marker": next(markers),
        }
        _draw_curve(ax, name, drawn, style, across is _accepted)
        points += [(x.value, y.value) for x, y, _ in drawn]
    front = pareto_front(points)
    ax.plot(
        [points[i][0] for i in front], [points[i][1] for i in front],
        color="black", linewidth=1.0, linestyle="--", label="Pareto front", zorder=1,
    )  # fmt: skip
    if any(r.recovery for r in of.values()):
        ax.axhline(1.0, color=GREY, linewidth=0.8, zorder=0)
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:.1%}")
    ax.set_xlabel(label)
    if points and max(x for x, _ in points) > _WIDE * min(x for x, _ in points):
        powers_of_two(ax, (1, 2, 4, 8, 16, 32), label)
        ax.set_xlim(*_around([x for x, _ in points]))


def _around(values: Sequence[float]) -> tuple[float, float]:
    return min(values) / 1.3, max(values) * 1.6


def _draw_curve(
    ax: Axes, name: str, points: Sequence[tuple[Interval, Interval, str]],
    style: Mapping[str, Any], labelled: bool,
) -> None:  # fmt: skip
    xs, ys, conditions = zip(*points, strict=True)
    if labelled and len(points) > 1:
        shared = _common_start(conditions)
        for x, y, condition in points:
            ax.annotate(
                condition.removeprefix(shared), (x.value, y.value), textcoords="offset points",
                xytext=(4, 4), fontsize=7, color=style["color"],
            )  # fmt: skip
    ax.errorbar(
        [x.value for x in xs], [y.value for y in ys],
        xerr=error_lengths(xs), yerr=error_lengths(ys),
        label=name, linewidth=1.2, elinewidth=0.8, capsize=2, markersize=5, zorder=2, **style,
    )  # fmt: skip


def _common_start(texts: Sequence[str]) -> str:
    """Return what texts begin with, up to the end of a word."""
    alike = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    start = "".join(letters[0] for letters in alike)
    return start[: max(start.rfind(" "), start.rfind("=")) + 1]


def error_lengths(values: Sequence[Interval]) -> list[list[float]]:
    """Return the lengths of the bars. A skewed sample's interval may lie beside its value."""
    return [
        [max(0.0, v.value - v.low) for v in values],
        [max(0.0, v.high - v.value) for v in values],
    ]
