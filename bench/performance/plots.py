"""The plots of docs/performance.md: ratios by group of prompts, and by requests at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyspec_lab.bench.conditions import PLAIN
from flyspec_lab.drawing import BLUE, GREY, ORANGE, powers_of_two, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Group = tuple[str, Mapping[str, Any]]
COLOURS = {"fly": ORANGE, "exact": BLUE, PLAIN: GREY}
_INCHES_PER_GROUP = 0.42


def plot_groups(groups: Sequence[Group], others: Sequence[str], start: Path) -> None:
    """START-groups.svg against plain decoding, START-others.svg against each other."""
    shown = [g for g in groups if any(mode in g[1] for mode in ("fly", "exact"))]
    if shown:
        _panels([PLAIN], shown, start.with_name(f"{start.name}-groups.svg"))
    present = [other for other in others if any(other in modes for _, modes in shown)]
    if present:
        _panels(present, shown, start.with_name(f"{start.name}-others.svg"))


def plot_batches(batches: Sequence[Mapping[str, Any]], start: Path) -> None:
    """START-batches.svg: tokens per second x plain, by concurrent requests."""
    if not batches:
        return
    groups = list(dict.fromkeys(b["group"] for b in batches))

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, len(groups), squeeze=False, sharey=True)[0]
        for ax, group in zip(axes, groups, strict=True):
            for mode, colour in COLOURS.items():
                of = [b for b in batches if (b["group"], b["mode"]) == (group, mode)]
                if of and mode != PLAIN:
                    sizes, ratios = [b["batch"] for b in of], [b["ratio_to_plain"] for b in of]
                    below = [b["ratio_to_plain"] - b["low"] for b in of]
                    above = [b["high"] - b["ratio_to_plain"] for b in of]
                    ax.errorbar(sizes, ratios, [below, above], fmt="o-", color=colour, label=mode)
            ax.axhline(1, color=GREY, linewidth=1, linestyle=":")
            powers_of_two(ax, sorted({b["batch"] for b in batches}), "concurrent requests")
            ax.set_title(group)
            ax.set_ylim(bottom=0)
        axes[0].set_ylabel("tokens/s, x plain")
        axes[0].legend(loc="best")

    save(start.with_name(f"{start.name}-batches.svg"), (4.2 * len(groups), 3.2), draw)


def _panels(bases: Sequence[str], groups: Sequence[Group], path: Path) -> None:
    """Draw one panel per base of comparison, with a line of two or three points per group."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, len(bases), squeeze=False, sharey=True)[0]
        for ax, base in zip(axes, bases, strict=True):
            _panel(ax, base, groups)
        axes[0].set_yticks(range(len(groups)), [name for name, _ in groups])
        axes[0].invert_yaxis()
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)

    width = 2.8 + max(3.6, 1.7 * len(bases))
    save(path, (width, 1.3 + _INCHES_PER_GROUP * len(groups)), draw)


def _panel(ax: Axes, base: str, groups: Sequence[Group]) -> None:
    for place, (mode, colour) in enumerate(COLOURS.items()):
        points = [(i, modes[mode]["ratios"][base]) for i, (_, modes) in enumerate(groups)
                  if mode in modes and base in modes[mode]["ratios"] and mode != base]  # fmt: skip
        if points:
            ax.errorbar(
                [r["median"] for _, r in points],
                [i + 0.2 * (place - 1) for i, _ in points],
                xerr=[[r["median"] - r["low"] for _, r in points],
                      [r["high"] - r["median"] for _, r in points]],
                fmt="o", color=colour, label=mode,
            )  # fmt: skip
            if base == PLAIN:
                ax.plot([r["worst"] for _, r in points],
                        [i + 0.2 * (place - 1) for i, _ in points],
                        "x", color=colour, markersize=5)  # fmt: skip
    ax.axvline(1, color=GREY, linewidth=1, linestyle=":")
    ax.set_xlim(left=0)
    ax.set_xlabel(f"x {base}" + ("; crosses: slowest prompt" if base == PLAIN else ""))
