"""Turns a study's evaluations into its page: claims, tables and plots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from flyspec.tables import FittedTable, make_table
from flyspec.values.admin import DrafterStatus, ModelInfo
from flyspec_lab import tables
from flyspec_lab.evaluation import Evaluation
from flyspec_lab.plots import draw_quality, size_of_quality
from flyspec_lab.problems import TaskProblems
from flyspec_lab.studies.axis import axis_plots
from flyspec_lab.studies.divergences import Divergences, divergence_section
from flyspec_lab.studies.page import Page, PagePlot, PageSection
from flyspec_lab.studies.study import ClaimFinding, Found, PaperClaim, Study, T

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
    divergences: Divergences | None = None,
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
        sections += [_labelled(section, of) for section in _sections(study, of)]
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


def _labelled(section: PageSection, found: Found) -> PageSection:
    """Say of what a section and its tables are, where the study has found others as well."""
    if not found.label:
        return section
    shown = [
        table
        if table.title is None or table.title.startswith(found.title)
        else replace(table, title=f"{found.label}: {table.title}")
        for table in section.tables
    ]
    heading = section.heading[:1].lower() + section.heading[1:]
    return replace(section, heading=f"{found.label}: {heading}", tables=shown)


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
    of = {found.title: found.reports}
    quality = PagePlot(
        f"{study.name}-{found.slug}-quality",
        "What each condition keeps against tokens per round and speed, with 95 % intervals.",
        lambda figure: draw_quality(figure, found.arms, of),
        size_of_quality(found.arms, of),
    )
    return [quality, *axis_plots(study, found)]
