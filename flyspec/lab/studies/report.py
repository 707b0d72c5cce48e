"""Turns a study's evaluation into its page: claims, tables, and plots over the study's axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from flyspec.bench.conditions import PLAIN
from flyspec.lab import tables
from flyspec.lab.compare import ConditionReport
from flyspec.lab.evaluation import Evaluation
from flyspec.lab.plots import COLORS, MARKERS, draw_quality, error_lengths
from flyspec.lab.statistics import Interval
from flyspec.lab.studies.page import Page, PagePlot, PageSection
from flyspec.lab.studies.study import Found, Study, value_of
from flyspec.tables import FittedTable, make_table
from flyspec.values.admin import DrafterStatus, ModelInfo

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CLAIMS_HEADING = "What papers report"
VERDICTS = {True: "yes", False: "no", None: "open"}


def page_of(
    study: Study,
    evaluation: Evaluation,
    target: ModelInfo,
    command: str,
    problem_seed: int,
    drafters: Sequence[DrafterStatus] = (),
) -> Page:
    """Return the report of a study on one task; `drafters` are the stack's."""
    ((task, reports),) = evaluation.conditions.items()
    found = Found(task, evaluation.arms, reports, evaluation.equal_costs[task])
    sections = []
    if study.claims:
        sections.append(PageSection(CLAIMS_HEADING, [_CLAIMS], [claims_table(study, found)]))
    sections.append(
        PageSection(
            "Figures",
            [tables.RULES_NOTES[:1].upper() + tables.RULES_NOTES[1:] + "."],
            [tables.rules_table(task, reports), tables.flips_table(reports)],
            _plots(study, evaluation, found),
        )
    )
    if costs := evaluation.equal_costs[task]:
        sections.append(
            PageSection("At equal cost", [tables.EQUAL_NOTES], [tables.equal_table(costs)])
        )
    if study.section is not None:
        sections.append(study.section(found))
    used = {arm.drafter for arm in evaluation.arms}
    facts = {
        "problems": f"{reports[0].problems} of {task}, seed {problem_seed}" if reports else "none",
        **facts_of(target, [drafter for drafter in drafters if drafter.name in used]),
    }
    return Page(study.title, study.question, command, facts, sections)


def facts_of(target: ModelInfo, drafters: Sequence[DrafterStatus]) -> dict[str, str]:
    """Say which models a study was made with."""
    return {
        "target": _described(target),
        "weights": target.weights_fingerprint,
        "numerics": target.numerics,
        **{f"drafter {drafter.name}": _drafting(drafter) for drafter in drafters},
    }


def _drafting(drafter: DrafterStatus) -> str:
    if drafter.model is None:
        return "no model"
    translated = ", another tokenizer than the target's" if drafter.translated else ""
    return f"{_described(drafter.model)}{translated}, weights {drafter.model.weights_fingerprint}"


def _described(model: ModelInfo) -> str:
    size = f"{model.num_parameters / 1e6:,.2f} M parameters"
    return f"{model.name}, {size}, {model.dtype} on {model.device}"


_CLAIMS = (
    "`holds` is `yes` or `no` where the 95 % intervals decide it, or an order is meant, and else "
    "`open`. The papers' models are large; what holds here is what holds for this pair."
)


def claims_table(study: Study, found: Found) -> FittedTable:
    """Return the study's claims with what was found; figures that are missing leave one open."""
    rows = []
    for claim in study.claims:
        finding = claim.check(found)
        rows.append([claim.text, claim.source, VERDICTS[finding.holds], finding.figures])
    return make_table(["claim", "source", "holds", "figures here"], rows, left=4)


def _plots(study: Study, evaluation: Evaluation, found: Found) -> list[PagePlot]:
    plots = [
        PagePlot(
            f"{study.name}-quality",
            "What each condition keeps against tokens per round and speed, with 95 % intervals.",
            lambda figure: draw_quality(figure, evaluation.arms, evaluation.conditions),
            (12.5, 4.4),
        )
    ]
    lines = lines_of(study, found)
    if any(len(points) > 1 for points in lines.values()):
        plots.append(
            PagePlot(
                f"{study.name}-axis",
                f"Recovery and speed over `{study.axis}`.",
                lambda figure: _draw_axis(figure, study.axis, lines),
                (10.5 if len(_panels(study.axis)) == 2 else 13.5, 4.0),
            )
        )
    return plots


Points = list[tuple[object, ConditionReport]]


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


Panel = tuple[str, Callable[[ConditionReport], Interval | None]]


def _panels(axis: str) -> list[Panel]:
    """Return what is drawn over an axis. Rounds of several drafters take different times."""
    panels: list[Panel] = [
        ("recovery, 95 % interval", lambda report: report.recovery),
        ("tokens per round", lambda report: report.mean_accepted_tokens_interval),
    ]
    if axis == "drafter":
        panels.append((f"tokens per second, relative to {PLAIN}", lambda report: report.speedup))
    return panels


def _draw_axis(figure: Figure, axis: str, lines: dict[str, Points]) -> None:
    panels = _panels(axis)
    axes = figure.subplots(1, len(panels))
    words = any(isinstance(value, str) for points in lines.values() for value, _ in points)
    places = list(dict.fromkeys(v for points in lines.values() for v, _ in points))
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
