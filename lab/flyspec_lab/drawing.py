"""Plots for documents and reports in one style: SVG (text kept as text), PNG or PDF.

matplotlib is imported only when needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from flyspec_lab.statistics import Interval

FORMATS = (".svg", ".png", ".pdf")

GREY = "#777777"
# Okabe and Ito's colors, told apart by the color-blind, without black and yellow.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
MARKERS = "os^Dv<>p"
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e5e5",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 4,
}


def save(
    to: Path | IO[Any],
    inches: tuple[float, float],
    draw: Callable[[Figure], None],
    form: str | None = None,
    salt: str = "flyspec",
) -> None:
    """Draw a figure of that size; its format is that of the file's name, unless one is given.

    Figures on one page need different salts for unique IDs.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    form = form or Path(str(to)).suffix[1:]
    metadata: dict[str, Any] = {"Date": None} if form == "svg" else {}
    with mpl.rc_context({**_STYLE, "svg.hashsalt": salt}):
        figure = Canvas(figsize=inches, layout="constrained")
        draw(figure)
        figure.savefig(to, format=form, metadata=metadata, dpi=150)


def draw_intervals(ax: Axes, points: Sequence[tuple[Interval, Interval]], **style: Any) -> None:
    """Draw points with their intervals as bars."""
    if points:
        (xs, x_bars), (ys, y_bars) = (_bars(values) for values in zip(*points, strict=True))
        style = {"capsize": 2, "linewidth": 1.2, "elinewidth": 0.8, **style}
        ax.errorbar(xs, ys, xerr=x_bars, yerr=y_bars, **style)


def _bars(values: Sequence[Interval]) -> tuple[list[float], list[list[float]]]:
    """Return values, and the lengths of their bars: an interval may lie beside its value."""
    return [v.value for v in values], [
        [max(0.0, v.value - v.low) for v in values],
        [max(0.0, v.high - v.value) for v in values],
    ]
