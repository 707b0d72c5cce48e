"""Plots for documents and reports in one style: SVG (text kept as text), PNG or PDF.

matplotlib is imported only when needed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".svg", ".png", ".pdf")

# Okabe and Ito's colors, told apart by the color-blind, without black and yellow.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
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
