"""Plots of a study's conditions over the parameter that it varies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from flyspec_lab.bench.conditions import PLAIN
from flyspec_lab.compare import ConditionReport
from flyspec_lab.plots import COLORS, MARKERS, error_lengths, quality_label, quality_of
from flyspec_lab.statistics import Interval
from flyspec_lab.studies.page import PagePlot
from flyspec_lab.studies.study import Found, Study, value_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDE = 20.0
"""Values that differ by more than this factor are shown on a logarithmic axis."""
Points = list[tuple[object, ConditionReport]]
Panel = tuple[str, Callable[[ConditionReport], Interval | None]]


def axis_plots(study: Study, found: Found) -> list[PagePlot]:
    """Return the plot over the study's axis; none if it has no axis, or no line two points."""
    if not study.axis:
        return []
    lines = lines_of(study, found)
    if all(len(points) < 2 for points in lines.values()):
        return []
    return [
        PagePlot(
            f"{study.name}-{found.slug}-axis",
            f"Quality and speed over `{study.axis}`.",
            lambda figure: _draw_axis(figure, study.axis, lines),
            (13.5 if study.axis == "drafter" else 10.5, 4.0),
        )
    ]


def lines_of(study: Study, found: Found) -> dict[str, Points]:
    """Return the conditions that have the study's axis, in lines of what differs in it alone."""
    lines: dict[str, Points] = {}
    for arm, report in found.pairs:
        value = value_of(arm, study.axis)
        if value is None or arm.condition.name == PLAIN or arm.k == 0:
            continue
        shown = {f"{value:g}" if isinstance(value, float) else str(value), str(value)}
        parts = report.condition.split(", ")
        name = ", ".join(p for p in parts if p.rpartition(" = ")[2] not in shown)
        lines.setdefault(name, []).append((value, report))
    return lines


def _panels(axis: str, reports: Sequence[ConditionReport]) -> list[Panel]:
    """Return what is drawn over an axis. Rounds of several drafters take different times."""
    panels: list[Panel] = [
        (quality_label(reports), quality_of),
        ("tokens per round", lambda report: report.mean_accepted_tokens_interval),
    ]
    if axis == "drafter":
        panels.append((f"tokens per second, relative to {PLAIN}", lambda report: report.speedup))
    return panels


def _draw_axis(figure: Figure, axis: str, lines: dict[str, Points]) -> None:
    reports = [report for points in lines.values() for _, report in points]
    panels = _panels(axis, reports)
    axes = figure.subplots(1, len(panels))
    words = any(isinstance(value, str) for points in lines.values() for value, _ in points)
    places = list(dict.fromkeys(v for points in lines.values() for v, _ in points))
    numbers = [] if words else [float(str(value)) for value in places]
    for (name, points), color, marker in zip(
        lines.items(), cycle(COLORS), cycle(MARKERS), strict=False
    ):
        at = [float(places.index(value)) if words else float(str(value)) for value, _ in points]
        for ax, (_, value_in) in zip(axes, panels, strict=True):
            _draw_line(ax, at, [value_in(report) for _, report in points], name, color, marker)
    for ax, (label, _) in zip(axes, panels, strict=True):
        ax.set_xlabel("K" if axis == "k" else axis)
        ax.set_ylabel(label)
        if words:
            ax.set_xticks(range(len(places)), [str(place) for place in places])
        elif 0 < _WIDE * min(numbers) < max(numbers):
            ax.set_xscale("log")
            ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if any(report.recovery for report in reports):
        axes[0].yaxis.set_major_formatter(lambda value, _: f"{value:.1%}")
    axes[-1].legend()


def _draw_line(
    ax: Axes,
    at: Sequence[float],
    intervals: Sequence[Interval | None],
    name: str,
    color: str,
    marker: str,
) -> None:
    known = [(x, i) for x, i in zip(at, intervals, strict=True) if i is not None]
    ax.errorbar(
        [x for x, _ in known],
        [i.value for _, i in known],
        yerr=error_lengths([i for _, i in known]),
        label=name, color=color, marker=marker, capsize=2, linewidth=1.2, elinewidth=0.8,
    )  # fmt: skip
