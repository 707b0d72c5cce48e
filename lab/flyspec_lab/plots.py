"""Plots of rules: quality against what speculation gains, gaps of tokens, gains by task."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flyspec_lab.arms import Arm
from flyspec_lab.bench.conditions import PLAIN
from flyspec_lab.compare import GAP_EDGES_NATS, ConditionReport
from flyspec_lab.curves import curves_of, is_control, is_exact, pareto_front
from flyspec_lab.drawing import BLUE, GREY, ORANGE, powers_of_two, save
from flyspec_lab.statistics import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colors, told apart by the color-blind, without black and yellow.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
MARKERS = "os^Dv<>p"
_WIDE = 4.0
"""Speeds that differ by more than this are shown on a logarithmic axis."""
_PANEL_INCHES = (5.6, 4.2)
_FLOOR = 0.85
"""Lowest recovery on an axis where most conditions keep more; what keeps less is at its edge."""
_BESIDE = 12
"""Curves named in a legend beside the plots; more are below them, in columns."""
_LEGEND_COLUMNS, _LEGEND_LINE_INCHES = 5, 0.19
_GAP_COLUMNS = 3
_GAP_PANEL_INCHES = (3.7, 2.3)


def plot_quality(
    path: Path, arms: Sequence[Arm], reports: Mapping[str, Sequence[ConditionReport]]
) -> None:
    """Draw a row of two plots for each task: against tokens per round, and against speed."""
    inches = size_of_quality(arms, reports)
    save(path, inches, lambda figure: draw_quality(figure, arms, reports))


def size_of_quality(
    arms: Sequence[Arm], reports: Mapping[str, Sequence[ConditionReport]]
) -> tuple[float, float]:
    """Return the inches of `draw_quality`."""
    width, height = _PANEL_INCHES
    tasks = sum(1 for of in reports.values() if of)
    names = len(curves_of(arms))
    height *= max(1, tasks)
    if names > _BESIDE:
        return 2 * width, height + 0.4 + _LEGEND_LINE_INCHES * -(-names // _LEGEND_COLUMNS)
    return 2 * width + 1.3, height


def draw_quality(
    figure: Figure, arms: Sequence[Arm], reports: Mapping[str, Sequence[ConditionReport]]
) -> None:
    """Draw them into a figure."""
    tasks = [name for name, of in reports.items() if of]
    axes = figure.subplots(len(tasks), 2, squeeze=False, sharey="row")
    names: dict[str, Any] = {}
    for (left, right), name in zip(axes, tasks, strict=True):
        of = {r.condition: r for r in reports[name]}
        floor = _floor(of.values())
        _panel(left, arms, of, _accepted, "tokens per round", floor)
        _panel(right, arms, of, _speed, _speed_label(of), floor)
        left.set_ylabel(quality_label(of.values()))
        left.set_title(f"{name}, {next(iter(of.values())).problems} problems", loc="left")
        handles, labels = right.get_legend_handles_labels()
        names |= dict(zip(labels, handles, strict=True))
    if len(curves_of(arms)) > _BESIDE:
        figure.legend(
            names.values(), names.keys(), loc="outside lower center", ncols=_LEGEND_COLUMNS,
            fontsize=8,
        )  # fmt: skip
    elif names:
        axes[0, 1].legend(names.values(), names.keys(), loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _floor(reports: Iterable[ConditionReport]) -> float | None:
    """Return where the axis begins; None if all fit on it, or most would not."""
    kept = [r.recovery.value for r in reports if r.recovery is not None]
    below = sum(value < _FLOOR for value in kept)
    return _FLOOR if 0 < below < len(kept) / 2 else None


Measured = Callable[[ConditionReport], Interval | None]


def _accepted(r: ConditionReport) -> Interval | None:
    return r.mean_accepted_tokens_interval


def _speed(r: ConditionReport) -> Interval | None:
    return r.speed_ratio or Interval(1.0, 1.0, 1.0, 1.0)


def _speed_label(of: Mapping[str, ConditionReport]) -> str:
    bases = dict.fromkeys(r.speed_base for r in of.values() if r.speed_base not in (None, PLAIN))
    return f"tokens per second, relative to {'exact' if bases else PLAIN}"


def quality_label(reports: Iterable[ConditionReport]) -> str:
    if any(r.recovery for r in reports):
        return "recovery, 95 % interval"
    return "log p per token, nats"


def quality_of(r: ConditionReport) -> Interval | None:
    """Return the recovery, or else the log-likelihood per token; None if neither is known."""
    if r.recovery is not None:
        return r.recovery
    value = r.log_likelihood_per_token
    return None if value is None else Interval(value, value, value, value)


def _panel(
    ax: Axes, arms: Sequence[Arm], of: Mapping[str, ConditionReport], across: Measured, label: str,
    floor: float | None,
) -> None:  # fmt: skip
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
            and (y := quality_of(of[arm.name])) is not None
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
        for x, y, _ in drawn:
            if floor is not None and y.value < floor:
                _mark_below(ax, x.value, y.value, floor, style["color"])
        points += [(x.value, y.value) for x, y, _ in drawn]
    if across is _speed:
        _draw_allocations(ax, arms, of)
    front = pareto_front(points)
    ax.plot(
        [points[i][0] for i in front], [points[i][1] for i in front],
        color="black", linewidth=1.0, linestyle="--", label="Pareto front", zorder=1,
    )  # fmt: skip
    if any(r.recovery for r in of.values()):
        ax.axhline(1.0, color=GREY, linewidth=0.8, zorder=0)
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:.1%}")
    if floor is not None:
        ax.set_ylim(bottom=floor)
    ax.set_xlabel(label)
    if points and max(x for x, _ in points) > _WIDE * min(x for x, _ in points):
        powers_of_two(ax, (0.25, 0.5, 1, 2, 4, 8, 16, 32), label)
        ax.set_xlim(*_around([x for x, _ in points]))


def _draw_allocations(ax: Axes, arms: Sequence[Arm], of: Mapping[str, ConditionReport]) -> None:
    """Draw what a random allocation of problems to the rival or to a large model is taken to give.

    The lines are straight in tokens per second, whatever the axis.
    """
    small = next((arm for arm in arms if arm.rival and arm.name in of), None)
    larges = [arm for arm in arms if arm.name in of and not arm.rival and is_exact(arm)]
    for large in larges if small else ():
        ends = [(_speed(of[arm.name]), quality_of(of[arm.name])) for arm in (large, small) if arm]
        known = [(x.value, y.value) for x, y in ends if x and y]
        if len(known) < 2:
            continue
        (x0, y0), (x1, y1) = known
        part = np.linspace(0.0, 1.0, 50)
        ax.plot(
            x0 + part * (x1 - x0), y0 + part * (y1 - y0), color=GREY, linewidth=1.0, zorder=0,
            label="random allocation" if large is larges[0] else None,
        )  # fmt: skip


def _mark_below(ax: Axes, x: float, value: float, floor: float, color: str) -> None:
    """Write at the edge of the plot what a point beyond it keeps."""
    ax.annotate(
        f"{value:.0%}\n↓", (x, floor), textcoords="offset points", xytext=(0, 1), ha="center",
        va="bottom", fontsize=7, linespacing=0.9, color=color,
    )  # fmt: skip


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
                xytext=(4, 4), fontsize=7, color=style["color"], annotation_clip=True,
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


def size_of_gaps(reports: Sequence[ConditionReport]) -> tuple[float, float]:
    """Return the inches of `draw_gaps`."""
    width, height = _GAP_PANEL_INCHES
    return _GAP_COLUMNS * width, height * -(-len(reports) // _GAP_COLUMNS) + 0.4


def draw_gaps(figure: Figure, reports: Sequence[ConditionReport]) -> None:
    """Draw a histogram of each condition's gaps: of loose and of rejected tokens, with means.

    Counts are per 1,000 tokens of text, on an axis that all share.
    """
    rows = -(-len(reports) // _GAP_COLUMNS)
    axes = figure.subplots(rows, _GAP_COLUMNS, squeeze=False, sharex=True, sharey=True)
    for ax, report in itertools.zip_longest(axes.flat, reports):
        if report is None:
            ax.set_axis_off()
        else:
            _draw_gap_panel(ax, report)
    for ax in axes[:, 0]:
        ax.set_ylabel("per 1,000 tokens")
    for ax in axes.flat[max(0, len(reports) - _GAP_COLUMNS) : len(reports)]:  # the lowest ones
        ax.tick_params(labelbottom=True)
        ax.set_xlabel("gap, nats")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper right", ncols=2)


def _draw_gap_panel(ax: Axes, report: ConditionReport) -> None:
    """Draw bins as wide as each other, whatever they span, loose tokens below rejected ones."""
    per_thousand = 1000 / max(1, report.tokens)
    places = range(len(GAP_EDGES_NATS))
    below = [0.0] * len(places)
    for counts, mean, color, name in (
        (report.gaps.loose, report.mean_loose_gap_nats, BLUE, "loose"),
        (report.gaps.rejected, report.mean_rejected_gap_nats, ORANGE, "rejected"),
    ):
        heights = [count * per_thousand for count in counts]
        ax.bar(
            places, heights, bottom=below, width=1.0, align="edge", color=color, alpha=0.75,
            label=name, edgecolor="white", linewidth=0.4,
        )  # fmt: skip
        below = [low + height for low, height in zip(below, heights, strict=True)]
        if mean is not None:
            ax.axvline(_gap_place(mean), color=color, linewidth=1.4, linestyle="--")
    ax.set_title(report.condition, loc="left", fontsize=9)
    ax.set_xticks(list(places)[::2], [f"{edge:g}" for edge in GAP_EDGES_NATS[::2]])


def _gap_place(gap: float) -> float:
    """Return where a gap lies on an axis of bins."""
    at = bisect.bisect_right(GAP_EDGES_NATS, gap) - 1
    if at + 1 == len(GAP_EDGES_NATS):
        return at + 0.5
    low, high = GAP_EDGES_NATS[at : at + 2]
    return at + (gap - low) / (high - low)


def draw_gains(figure: Figure, tasks: Mapping[str, tuple[bool, Mapping[str, Interval]]]) -> None:
    """Draw ratios to `exact` by task and condition, as what they are above 1.

    A task has with its gains whether it is open, which its marks show by being hollow.
    """
    from matplotlib.ticker import MaxNLocator

    ax = figure.subplots()
    conditions = list(dict.fromkeys(name for _, gains in tasks.values() for name in gains))
    for i, (task, (is_open, gains)) in enumerate(tasks.items()):
        color = COLORS[i % len(COLORS)]
        known = [(conditions.index(name), gain) for name, gain in gains.items()]
        offset = 0.6 * ((i + 1) / (len(tasks) + 1) - 0.5)
        ax.errorbar(
            [gain.value - 1 for _, gain in known],
            [place + offset for place, _ in known],
            xerr=error_lengths([gain for _, gain in known]),
            label=task, color=color, marker=MARKERS[i % len(MARKERS)], linestyle="", capsize=2,
            elinewidth=0.9, markersize=5, markerfacecolor="white" if is_open else color,
        )  # fmt: skip
    ax.set_yticks(range(len(conditions)), conditions)
    ax.invert_yaxis()
    ax.axvline(0.0, color=GREY, linewidth=0.8, zorder=0)
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:+.0%}")
    ax.set_xlabel("gain in tokens per round over exact")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
