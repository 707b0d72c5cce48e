"""The section of a report on how far draft and target are apart, by data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from flyspec.rules.presets import RULE_PRESETS
from flyspec.tables import FittedTable, make_table
from flyspec_lab.plots import COLORS
from flyspec_lab.studies.page import PagePlot, PageSection

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from flyspec_lab.tuning.replay import DraftedDivergences

_BINS = 40
_QUANTILES = (0.5, 0.9, 0.99)
_BELOW = (0.01, 0.05, 0.1, 0.3)
MAX_PROMPTS = 100
"""Prompts of a data set that are recorded for it: thousands of positions."""
Divergences = Mapping[str, "DraftedDivergences"]

_TEXT = (
    "The divergence at every position at which a token was drafted along the target's own greedy "
    f"text, on the first {MAX_PROMPTS} prompts of a data set at most, as the rule `fuzzy` computes "
    "it: the distributions are those of temperature 1. Positions after a round's first mismatch "
    "count, too. A threshold T keeps the drafts to the "
    "left of it. The scale of the shares is logarithmic: at most positions the models are nearly "
    "the same."
)


def divergence_section(found: Divergences) -> PageSection:
    """Return a histogram of each data set's divergences, and a table of them."""
    (kind,) = {of.kind for of in found.values()}
    return PageSection(
        f"{kind.name} divergence by data set",
        [_TEXT],
        [divergence_table(found)],
        [
            PagePlot(
                "divergences",
                f"Share of drafted positions by {kind.name} divergence; dotted: mismatches.",
                lambda figure: draw_divergences(figure, found),
            )
        ],
    )


def divergence_table(found: Divergences) -> FittedTable:
    """Return quantiles, and shares of drafts below thresholds: of all, and of mismatches."""
    columns = ["data set", "drafted", "mismatches", *(f"{q:.0%}" for q in _QUANTILES)]
    columns += [f"< {t:g}" for t in _BELOW] + [f"mismatches < {t:g}" for t in _BELOW]
    rows = []
    for task, of in found.items():
        wrong = of.values[~of.matches]
        rows.append(
            [
                task,
                f"{len(of.values):,}",
                f"{_share(~of.matches)}",
                *(f"{v:.4f}" for v in np.quantile(of.values, _QUANTILES) if len(of.values)),
                *(_share(of.values < t) for t in _BELOW),
                *(_share(wrong < t) for t in _BELOW),
            ]
        )
    (kind,) = {of.kind for of in found.values()}
    return make_table(columns, rows, f"{kind.name} divergence of drafted positions")


def _share(of: np.ndarray) -> str:
    return f"{of.mean():.1%}" if len(of) else "-"


def draw_divergences(figure: Figure, found: Divergences) -> None:
    """Draw the share of positions over the divergence; each data set's bins add up to 1."""
    ax = figure.subplots()
    (kind,) = {of.kind for of in found.values()}
    largest = RULE_PRESETS["fuzzy"].largest.get(kind)
    top = largest or max(float(of.values.max(initial=0.0)) for of in found.values())
    edges = np.linspace(0.0, top, _BINS + 1).tolist()
    for index, (task, of) in enumerate(found.items()):
        color = COLORS[index % len(COLORS)]
        weight = 1.0 / max(1, len(of.values))
        for values, style, label in (
            (of.values, "-", task), (of.values[~of.matches], ":", None),
        ):  # fmt: skip
            ax.hist(
                values, edges, weights=np.full(len(values), weight), histtype="step",
                color=color, linestyle=style, label=label, linewidth=1.4,
            )  # fmt: skip
    ax.set_yscale("log")
    ax.set_xlabel(f"{kind.name}(p, q)" + ("" if kind.name == "TV" else ", nats"))
    ax.set_ylabel("share of drafted positions")
    ax.legend()
