"""Turns a study's evaluation into its page: claims, tables, and plots over the study's axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from flyspec.bench.conditions import PLAIN
from flyspec.lab import tables
from flyspec.lab.compare import ConditionReport
from flyspec.lab.evaluation import Evaluation
from flyspec.lab.plots import COLORS, MARKERS, draw_quality, error_lengths
from flyspec.lab.statistics import Interval
from flyspec.lab.studies.divergences import divergence_section
from flyspec.lab.studies.page import Page, PagePlot, PageSection
from flyspec.lab.studies.study import Found, Study, value_of
from flyspec.tables import FittedTable, make_table
from flyspec.values.admin import ModelInfo

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from flyspec.lab.tuning.divergences import DraftedDivergences

_WIDE = 20.0
"""Values of an axis that differ by more than this factor are shown on a logarithmic one."""
CLAIMS_HEADING = "What papers report"
_VERDICTS = {True: "yes", False: "no", None: "open"}


def page_of(
    study: Study,
    parts: Mapping[str, Evaluation],
    target: ModelInfo,
    command: str,
    problem_seed: int,
    divergences: Mapping[str, DraftedDivergences] | None = None,
) -> Page:
    """Return the report of a study on one task, from the evaluations of its parts.

    `divergences` of draft and target are by task.
    """
    found = {}
    for part, evaluation in parts.items():
        ((task, reports),) = evaluation.conditions.items()
        found[part] = Found(
            task, evaluation.arms, reports, evaluation.equal_costs[task],
            evaluation.allocations[task], evaluation.answered[task], part,
        )  # fmt: skip
    sections = []
    if study.claims:
        table = claims_table(study, list(found.values()))
        sections.append(PageSection(CLAIMS_HEADING, [_CLAIMS], [table]))
    for part, evaluation in parts.items():
        sections += _sections(study, evaluation, found[part])
    if divergences:
        sections.append(divergence_section(divergences))
    first = next(iter(parts.values()))
    ((task, reports),) = first.conditions.items()
    facts = {
        "problems": f"{reports[0].problems} of {task}, seed {problem_seed}" if reports else "none",
        "target": f"{target.name}, {target.dtype} on {target.device}",
        "weights": target.weights_fingerprint,
        "numerics": target.numerics,
    }
    return Page(study.title, study.question, command, facts, sections)


def _sections(study: Study, evaluation: Evaluation, found: Found) -> list[PageSection]:
    """Return the sections about a part."""
    task, of_part = found.task, f", {found.part}" if found.part else ""
    reports = evaluation.conditions[task]
    sections = [
        PageSection(
            f"Figures{of_part}",
            [_sentence(tables.RULES_NOTES)],
            [tables.rules_table(f"{task}{of_part}", reports), tables.flips_table(reports)],
            _plots(study, evaluation, found),
        )
    ]
    if study.analyse is not None:
        sections += study.analyse(found)
    if leads := found.allocations:
        table = tables.allocation_table(leads)
        heading = f"Against a random allocation{of_part}"
        sections.append(PageSection(heading, [_sentence(tables.ALLOCATION_NOTES)], [table]))
    if costs := [cost for cost in found.equal_costs if cost.of.startswith(study.against)]:
        heading = f"At equal cost{of_part}"
        sections.append(PageSection(heading, [tables.EQUAL_NOTES], [tables.equal_table(costs)]))
    return sections


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


_CLAIMS = (
    "`holds` is `yes` or `no` where the 95 % intervals decide it, or an order is meant, and else "
    "`open`. The papers' models are large; what holds here is what holds for this pair."
)


def claims_table(study: Study, found: Sequence[Found]) -> FittedTable:
    """Return the study's claims with what its parts show; missing figures leave one open."""
    rows = []
    for claim in study.claims:
        for of in found:
            finding = claim.check(of)
            text = f"{claim.text} ({of.part})" if of.part else claim.text
            rows.append([text, claim.source, _VERDICTS[finding.holds], finding.figures])
    return make_table(["claim", "source", "holds", "figures here"], rows, left=4)


def _plots(study: Study, evaluation: Evaluation, found: Found) -> list[PagePlot]:
    name = f"{study.name}-{found.part}" if found.part else study.name
    plots = [
        PagePlot(
            f"{name}-quality",
            "What each condition keeps against tokens per round and speed, with 95 % intervals.",
            lambda figure: draw_quality(figure, evaluation.arms, evaluation.conditions),
            (12.5, 4.4),
        )
    ]
    lines = lines_of(study, found)
    if any(len(points) > 1 for points in lines.values()):
        plots.append(
            PagePlot(
                f"{name}-axis",
                f"Recovery and tokens per round over `{study.axis}`.",
                lambda figure: _draw_axis(figure, study.axis, lines),
                (10.5, 4.0),
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


def _draw_axis(figure: Figure, axis: str, lines: dict[str, Points]) -> None:
    left, right = figure.subplots(1, 2)
    words = any(isinstance(value, str) for points in lines.values() for value, _ in points)
    places = list(dict.fromkeys(v for points in lines.values() for v, _ in points))
    numbers = [] if words else [float(str(value)) for value in places]
    for (name, points), color, marker in zip(
        lines.items(), cycle(COLORS), cycle(MARKERS), strict=False
    ):
        at = [float(places.index(value)) if words else float(str(value)) for value, _ in points]
        for ax, intervals in (
            (left, [report.recovery for _, report in points]),
            (right, [report.mean_accepted_tokens_interval for _, report in points]),
        ):
            _draw_line(ax, at, intervals, name, color, marker)
    for ax, label in ((left, "recovery, 95 % interval"), (right, "tokens per round")):
        ax.set_xlabel("K" if axis == "k" else axis)
        ax.set_ylabel(label)
        if words:
            ax.set_xticks(range(len(places)), [str(place) for place in places])
        elif 0 < _WIDE * min(numbers) < max(numbers):
            ax.set_xscale("log")
            ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    left.yaxis.set_major_formatter(lambda value, _: f"{value:.1%}")
    right.legend()


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
