"""Turns a study's evaluation into its page: claims, tables, and plots over the study's axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING

from flyspec.bench.conditions import PLAIN
from flyspec.lab import tables
from flyspec.lab.compare import ConditionReport
from flyspec.lab.evaluation import Evaluation
from flyspec.lab.plots import (
    COLORS,
    MARKERS,
    draw_quality,
    error_lengths,
    quality_label,
    quality_of,
)
from flyspec.lab.problems import TaskProblems
from flyspec.lab.statistics import Interval
from flyspec.lab.studies.divergences import divergence_section
from flyspec.lab.studies.page import Page, PagePlot, PageSection
from flyspec.lab.studies.study import ClaimFinding, Found, PaperClaim, Study, T, value_of
from flyspec.tables import FittedTable, make_table
from flyspec.values.admin import DrafterStatus, ModelInfo

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from flyspec.lab.tuning.divergences import DraftedDivergences

_WIDE = 20.0
"""Values of an axis that differ by more than this factor are shown on a logarithmic one."""
CLAIMS_HEADING = "What papers report"
VERDICTS = {True: "yes", False: "no", None: "open"}


def page_of(
    study: Study,
    parts: Mapping[str, Evaluation],
    tasks: Sequence[TaskProblems],
    target: ModelInfo,
    command: str,
    problem_seed: int,
    drafters: Sequence[DrafterStatus] = (),
    divergences: Mapping[str, DraftedDivergences] | None = None,
) -> Page:
    """Return the report of a study: what it says of all it found, then sections for each.

    That is for each task, and each of its `parts` that was evaluated. `drafters` are the stack's;
    `divergences` of draft and target are by task.
    """
    found = [
        _found(task, evaluation, part, [task.name] * (len(tasks) > 1) + [part] * bool(part))
        for part, evaluation in parts.items()
        for task in tasks
    ]
    with_texts = [of for of in found if of.reports]
    sections = []
    if with_texts and (study.claims or study.tasks_claims):
        sections.append(PageSection(CLAIMS_HEADING, [_CLAIMS], [claims_table(study, with_texts)]))
    if with_texts and study.overview is not None:
        sections.append(study.overview(with_texts))
    for of in found:
        for section in _sections(study, of):
            heading = f"{of.label}: {_lower(section.heading)}" if of.label else section.heading
            sections.append(replace(section, heading=heading))
    if divergences:
        sections.append(divergence_section(divergences))
    used = {arm.drafter for evaluation in parts.values() for arm in evaluation.arms}
    facts = {
        "problems": _problems(found, problem_seed),
        **facts_of(target, [drafter for drafter in drafters if drafter.name in used]),
    }
    return Page(study.title, study.question, command, facts, _said_once(sections))


def _problems(found: Sequence[Found], seed: int) -> str:
    counted = [(f"{of.part}: " if of.part else "") + _counted(of) for of in found]
    return f"{'; '.join(counted)}; seed {seed}" if len(found) > 1 else f"{counted[0]}, seed {seed}"


def _counted(of: Found) -> str:
    if not of.reports:
        return f"0 of {of.task}"
    problems, samples = of.reports[0].problems, of.reports[0].samples
    return f"{problems} of {of.task}" + (f", {samples} texts" if samples > problems else "")


def _said_once(sections: Iterable[PageSection]) -> list[PageSection]:
    """Leave out paragraphs that an earlier section has."""
    said: set[str] = set()
    found = []
    for section in sections:
        new = [text for text in section.paragraphs if text not in said]
        said.update(new)
        found.append(replace(section, paragraphs=new))
    return found


def _sentence(notes: str) -> str:
    return notes[:1].upper() + notes[1:] + "."


def _lower(heading: str) -> str:
    return heading[:1].lower() + heading[1:]


def _found(task: TaskProblems, evaluation: Evaluation, part: str, labels: Sequence[str]) -> Found:
    return Found(
        task.name,
        evaluation.arms,
        evaluation.conditions[task.name],
        evaluation.equal_costs[task.name],
        evaluation.allocations[task.name],
        evaluation.answered[task.name],
        task.is_open,
        part,
        ", ".join(labels),
    )


def _sections(study: Study, found: Found) -> list[PageSection]:
    """Return what is said of a task, by a part of the study."""
    reports = found.reports
    if not reports:
        return [PageSection("Figures", ["No problem has an answer under every condition yet."])]
    sections = [] if study.sections is None else [*study.sections(found)]
    shown = [tables.rules_table(found.title, reports)]
    if any(report.flips for report in reports):
        shown.append(tables.flips_table(reports))
    notes = [_sentence(tables.RULES_NOTES)]
    sections.append(PageSection("Figures", notes, shown, _plots(study, found)))
    if leads := found.allocations:
        notes = [_sentence(tables.ALLOCATION_NOTES)]
        table = tables.allocation_table(leads)
        sections.append(PageSection("Against a random allocation", notes, [table]))
    if costs := [cost for cost in found.equal_costs if cost.of.startswith(study.against)]:
        notes = [_sentence(tables.EQUAL_NOTES)]
        sections.append(PageSection("At equal cost", notes, [tables.equal_table(costs)]))
    return sections


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


def claims_table(study: Study, found: Sequence[Found]) -> FittedTable:
    """Return the study's claims with what was found: on its tasks together, then on each."""
    rows = [_claim_row(claim, found) for claim in study.tasks_claims]
    for of in found:
        for claim in study.claims:
            text, *rest = _claim_row(claim, of)
            rows.append([f"{of.label}: {text}" if of.label else text, *rest])
    return make_table(["claim", "source", "holds", "figures here"], rows, left=4)


def _claim_row(claim: PaperClaim[T], found: T) -> list[str]:
    """Return a claim with what was found; conditions without texts leave it open."""
    try:
        finding = claim.check(found)
    except LookupError:
        finding = ClaimFinding(None, "a condition has no texts yet")
    return [claim.text, claim.source, VERDICTS[finding.holds], finding.figures]


def _plots(study: Study, found: Found) -> list[PagePlot]:
    name = f"{study.name}-{found.slug}"
    plots = [
        PagePlot(
            f"{name}-quality",
            "What each condition keeps against tokens per round and speed, with 95 % intervals.",
            lambda figure: draw_quality(figure, found.arms, {found.title: found.reports}),
            (12.5, 4.4),
        )
    ]
    lines = lines_of(study, found)
    if any(len(points) > 1 for points in lines.values()):
        plots.append(
            PagePlot(
                f"{name}-axis",
                f"Quality and speed over `{study.axis}`.",
                lambda figure: _draw_axis(figure, study.axis, lines),
                (13.5 if study.axis == "drafter" else 10.5, 4.0),
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
