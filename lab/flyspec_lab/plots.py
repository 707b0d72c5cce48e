"""The plot of rules: quality against tokens per round and against speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from flyspec_lab.arms import Arm
from flyspec_lab.bench.conditions import PLAIN
from flyspec_lab.compare import ConditionReport
from flyspec_lab.curves import curves_of, is_control, is_exact
from flyspec_lab.drawing import COLORS
from flyspec_lab.evaluation import Found
from flyspec_lab.report import Plot
from flyspec_lab.statistics import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GREY, _MARKERS = "#777777", "os^Dv<>p"
_PANEL_INCHES, _NAME_INCHES = (5.6, 4.2), 0.19


def quality_plot(name: str, found: Sequence[Found]) -> Plot:
    """Return a row of two plots for each task: against tokens per round, and against speed."""
    tasks = {each.task: {r.condition: r for r in each.reports} for each in found if each.reports}
    arms = found[0].arms

    def draw(figure: Figure) -> None:
        axes = figure.subplots(len(tasks), 2, squeeze=False, sharey="row")
        for (left, right), (task, of) in zip(axes, tasks.items(), strict=True):
            bases = {r.speed_base for r in of.values()} - {None, PLAIN}
            base = "exact" if bases else PLAIN
            recovered = any(r.recovery for r in of.values())
            left.set_ylabel("recovery, 95 % interval" if recovered else "log p per token, nats")
            left.set_title(f"{task}, {next(iter(of.values())).problems} problems", loc="left")
            _panel(left, arms, of, _accepted, "tokens per round")
            _panel(right, arms, of, _speed, f"tokens per second, relative to {base}")
        shown = [ax.get_legend_handles_labels() for ax in axes[:, 1]]
        names = {name: handle for of in shown for handle, name in zip(*of, strict=True)}
        figure.legend(names.values(), names.keys(), loc="outside right upper")

    width, height = _PANEL_INCHES
    inches = 2 * width + 2.0, max(height * len(tasks), 1.0 + _NAME_INCHES * len(curves_of(arms)))
    caption = "Quality of each condition against tokens per round and speed, with 95 % intervals."
    return Plot(name, caption, draw, inches)


def _accepted(r: ConditionReport) -> Interval | None:
    return r.mean_accepted_tokens_interval


def _speed(r: ConditionReport) -> Interval | None:
    return r.speed_ratio or Interval(1.0, 1.0, 1.0)


def quality_of(r: ConditionReport) -> Interval | None:
    """Return the recovery, or else the log-likelihood per token; None if neither is known."""
    value = r.log_likelihood_per_token
    return r.recovery or (None if value is None else Interval(value, value, value))


def _panel(
    ax: Axes,
    arms: Sequence[Arm],
    of: Mapping[str, ConditionReport],
    across: Callable[[ConditionReport], Interval | None],
    label: str,
) -> None:
    """Draw each rule's conditions in one color, joined in the order of `across`."""
    colors, markers = cycle(COLORS), cycle(_MARKERS)
    plain = {a.name: [a] for a in arms if a.k == 0 and across is _speed}
    for name, members in {**curves_of(arms), **plain}.items():
        drawn = [
            (x, y, of[arm.name].condition)
            for arm in members
            if arm.name in of and (x := across(of[arm.name])) and (y := quality_of(of[arm.name]))
        ]
        drawn.sort(key=lambda point: point[0].value)
        control = name in plain or is_control(members[0])
        color = _GREY if control else next(colors)
        style: dict[str, Any] = {"color": color, "marker": next(markers)}
        line = ":" if control else "-"
        if drawn:
            xs, ys, _ = zip(*drawn, strict=True)
            ax.errorbar(
                [x.value for x in xs], [y.value for y in ys], xerr=_bars(xs), yerr=_bars(ys),
                label=name, linestyle=line, capsize=2, linewidth=1.2, elinewidth=0.8, **style,
            )  # fmt: skip
        if across is _accepted and len(drawn) > 1:
            for x, y, condition in drawn:
                value = condition.rpartition("=")[2].strip()
                ax.annotate(value, (x.value, y.value), textcoords="offset points", xytext=(4, 4),
                            fontsize=7, color=color)  # fmt: skip
    if across is _speed:
        _draw_allocations(ax, arms, of)
    if any(r.recovery for r in of.values()):
        ax.axhline(1.0, color=_GREY, linewidth=0.8, zorder=0)
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:.1%}")
    ax.set_xlabel(label)


def _bars(values: Sequence[Interval]) -> list[list[float]]:
    """Return the lengths of bars on both sides: an interval may lie beside its value."""
    return [
        [max(0.0, v.value - v.low) for v in values],
        [max(0.0, v.high - v.value) for v in values],
    ]


def _draw_allocations(ax: Axes, arms: Sequence[Arm], of: Mapping[str, ConditionReport]) -> None:
    """Draw the lines of a random allocation of problems to the rival or to a large model.

    They are straight in tokens per second, whatever the axis.
    """
    ends = [(_speed(of[a.name]), quality_of(of[a.name]), a) for a in arms if a.name in of]
    known = [(x.value, y.value, arm) for x, y, arm in ends if x and y]
    part = np.linspace(0.0, 1.0, 50)
    for x1, y1, _ in [end for end in known if end[2].rival][:1]:
        larges = [end for end in known if is_exact(end[2]) and not end[2].rival]
        for index, (x0, y0, _) in enumerate(larges):
            label = None if index else "random allocation"
            ax.plot(x0 + part * (x1 - x0), y0 + part * (y1 - y0), color=_GREY, linewidth=1.0,
                    zorder=0, label=label)  # fmt: skip
