"""Plots of reports of `flyspec bench` in documents, each of several reports together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flyspec_lab.bench.conditions import PLAIN
from flyspec_lab.drawing import BLUE, GREY, ORANGE, draw_intervals, powers_of_two
from flyspec_lab.report import Plot
from flyspec_lab.statistics import Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Documents = Sequence[Mapping[str, Any]]
COLORS = {"fly": ORANGE, "exact": BLUE, PLAIN: GREY}


def plot_groups(documents: Documents) -> Plot | None:
    """Return ratios to plain decoding by group of prompts."""
    return _ratios("groups", documents, [PLAIN])


def plot_others(documents: Documents) -> Plot | None:
    """Return ratios to other software by group of prompts."""
    others = [name for document in documents for name in document.get("others", ())]
    return _ratios("others", documents, list(dict.fromkeys(others)))


def _ratios(name: str, documents: Documents, bases: Sequence[str]) -> Plot | None:
    """Draw a panel for each base of comparison, with a line of two or three points per group.

    Of a mode that several reports have, that of most repeats is drawn.
    """
    groups: dict[str, dict[str, Any]] = {}
    for document in sorted(documents, key=lambda d: int(d["repeats"])):
        for group, modes in document["groups"].items():
            found = {mode["mode"].removesuffix(", K auto"): mode["ratios"] for mode in modes}
            groups.setdefault(group, {}).update(found)
    if not groups or not bases:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, len(bases), squeeze=False, sharey=True)[0]
        for ax, base in zip(axes, bases, strict=True):
            for place, (mode, color) in enumerate(COLORS.items()):
                ratios = [
                    (modes[mode][base], row + 0.2 * (place - 1))
                    for row, modes in enumerate(groups.values())
                    if mode != base and base in modes.get(mode, {})
                ]
                points = [(_interval(r, "median"), y) for r, y in ratios]
                style = {"marker": "o", "linestyle": "", "color": color}
                draw_intervals(ax, points, label=mode, **style)
                ax.plot([r["worst"] for r, _ in ratios], [y for _, y in ratios], "x", color=color)
            ax.axvline(1, color=GREY, linewidth=1, linestyle=":")
            ax.set(xlim=(0, None), xlabel=f"x {base}")
        axes[0].set_yticks(range(len(groups)), list(groups))
        axes[0].invert_yaxis()
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)

    inches = (2.8 + max(3.6, 1.7 * len(bases)), 1.3 + 0.42 * len(groups))
    return Plot(name, "Speed by group of prompts; crosses: slowest prompt.", draw, inches)


def plot_batches(documents: Documents) -> Plot | None:
    """Return tokens per second relative to plain decoding, by concurrent requests."""
    batches = [b for document in documents for b in document["batches"]]
    groups = list(dict.fromkeys(b["group"] for b in batches))

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, len(groups), squeeze=False, sharey=True)[0]
        for ax, group in zip(axes, groups, strict=True):
            for mode in ("fly", "exact"):
                points = [
                    (b["batch"], _interval(b, "ratio_to_plain"))
                    for b in batches
                    if (b["group"], b["mode"]) == (group, mode)
                ]
                draw_intervals(ax, points, color=COLORS[mode], label=mode, marker="o")
            ax.axhline(1, color=GREY, linewidth=1, linestyle=":")
            powers_of_two(ax, sorted({b["batch"] for b in batches}), "concurrent requests")
            ax.set(title=group, ylim=(0, None))
        axes[0].set_ylabel("tokens/s, x plain")
        axes[0].legend()

    caption = "Speed relative to plain decoding by concurrent requests."
    return Plot("batches", caption, draw, (4.2 * len(groups), 3.2)) if batches else None


def _interval(ratio: Mapping[str, float], value: str) -> Interval:
    return Interval(ratio[value], ratio["low"], ratio["high"])


PLOTS: Mapping[str, Callable[[Documents], Plot | None]] = {
    "groups": plot_groups,
    "others": plot_others,
    "batches": plot_batches,
}
