"""The plot of docs/gpu.md: times of steps against their bound."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.gpu.parts import Document
from flyspec_lab.bench.device.tables import MODE_NAMES
from flyspec_lab.drawing import BLUE, GREY, ORANGE, ORDERED, powers_of_two, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"eager": ORANGE, "captured": ORDERED[1], "compiled": BLUE}


def plot_steps(documents: Sequence[Document], path: Path) -> bool:
    """Plot steps by batch, a panel for each number of tokens at the longest context of the largest
    model; return whether there was anything to plot."""
    document = max(documents, key=lambda d: int(d["target_parameters"]), default=None)
    if document is None or not document["steps"]:
        return False
    context = max(s["context"] for s in document["steps"])
    steps = [s for s in document["steps"] if s["context"] == context]
    tokens = sorted({s["tokens"] for s in steps})

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, len(tokens), squeeze=False, sharey=True)[0]
        for ax, count in zip(axes, tokens, strict=True):
            of = [s for s in steps if s["tokens"] == count]
            for mode, colour in COLOURS.items():
                own = sorted((s["batch"], s["step_ms"]) for s in of if s["mode"] == mode)
                if own:
                    ax.plot(*zip(*own, strict=True), "o-", color=colour, label=MODE_NAMES[mode])
            bounds: dict[Any, float] = {s["batch"]: s["bound_ms"] for s in of}
            batches = sorted(bounds)
            ax.plot(batches, [bounds[b] for b in batches], "--", color=GREY, label="bound")
            powers_of_two(ax, batches, "sequences")
            ax.set_title(f"{count} token{'s' * (count > 1)} each")
            ax.set_ylim(bottom=0)
        axes[0].set_ylabel(f"ms per step, context {context:,}")
        axes[0].legend(loc="best")

    save(path, (3.0 * len(tokens), 3.2), draw)
    return True
