"""A study: a question, the conditions that answer it, the claims of papers, and its report."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flyspec.cli.conditions import Condition
from flyspec.tables import FittedTable, make_table
from flyspec.values.admin import DrafterStatus, ModelInfo
from flyspec_lab.answered import Answered
from flyspec_lab.arms import Arm, parse_grid
from flyspec_lab.bench.conditions import PLAIN, parse_conditions
from flyspec_lab.compare import ConditionReport
from flyspec_lab.curves import AllocationLead, EqualCost
from flyspec_lab.drawing import COLORS, MARKERS, draw_intervals
from flyspec_lab.evaluation import Evaluation
from flyspec_lab.options import EvalOptions, ProblemOptions, StudyOptions, TaskPaths
from flyspec_lab.plots import quality_label, quality_of, quality_plot
from flyspec_lab.problems import TaskProblems, read_problems
from flyspec_lab.report import Plot, Report, Section
from flyspec_lab.statistics import Interval
from flyspec_lab.tables import task_section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLAIMS_HEADING = "What papers report"
VERDICTS = {True: "yes", False: "no", None: "open"}
MODEL = "model"
"""The kind of a drafter that is a draft model, and the name of a stack's own."""
_WIDE = 20.0
"""Values that differ by more than this factor are shown on a logarithmic axis."""


class ClaimFinding(NamedTuple):
    """The verdict on a claim, None if the figures do not decide it, and the figures."""

    holds: bool | None
    figures: str


@dataclass(frozen=True)
class PaperClaim:
    """A source's claim; `check` decides by figures whether it holds here.

    It gets the findings on a task; of a claim about tasks against each other, on all of them.
    """

    text: str
    source: str
    check: Callable[[Any], ClaimFinding]


def decided(yes: object, no: object, figures: str) -> ClaimFinding:
    """Return a finding: that a claim holds, or else that it does not, if either is shown."""
    return ClaimFinding(True if yes else False if no else None, figures)


def with_bounds(estimate: Interval | None, form: str) -> str:
    """Return an estimate with its interval, as a claim's figures show it."""
    if estimate is None:
        return "unknown"
    value, low, high = (f"{part:{form}}" for part in (estimate.value, estimate.low, estimate.high))
    return f"{value} ({low} to {high})"


@dataclass(frozen=True)
class Found:
    """A study's conditions on a task with their reports, to be asked for by what they are.

    `part` is the part of the study that they are of, `answered` their texts. `is_open`: whether the
    task's answers may be worded in many ways.
    """

    task: str
    arms: Sequence[Arm]
    reports: Sequence[ConditionReport]
    equal_costs: Sequence[EqualCost] = ()
    allocations: Sequence[AllocationLead] = ()
    answered: Answered | None = None
    is_open: bool = False
    part: str = ""

    @cached_property
    def pairs(self) -> list[tuple[Arm, ConditionReport]]:
        """The conditions that have texts."""
        by_name = {report.condition: report for report in self.reports}
        return [(arm, by_name[arm.name]) for arm in self.arms if arm.name in by_name]

    @property
    def title(self) -> str:
        """The task, and the study's part if it has several."""
        return f"{self.task}, {self.part}" if self.part else self.task

    def of(self, rule: str, **parameters: Any) -> list[tuple[Arm, ConditionReport]]:
        """Return the conditions by this preset with these parameters; `k` is K."""
        wanted = {"name": rule, **parameters}
        return [
            (arm, report)
            for arm, report in self.pairs
            if arm.k != 0 and all(value_of(arm, name) == wanted[name] for name in wanted)
        ]

    def one(self, rule: str, **parameters: Any) -> ConditionReport:
        """Return the report of the only such condition. Raises `LookupError` if it has no texts."""
        found = self.of(rule, **parameters)
        if not found:
            raise LookupError(rule)
        ((_, report),) = found
        return report


def value_of(arm: Arm, name: str) -> Any:
    """Return a parameter of a condition's rule, its K (`k`) or its drafter."""
    return getattr(arm, name) if name in ("k", "drafter") else getattr(arm.rule, name)


@dataclass(frozen=True)
class Study:
    """One question about rules.

    `rules` and `grid` are as on the command line of `flyspec eval`. `axis` is the parameter that
    plots have across, a field of `Rule`, `k` or `drafter`, "" for none. `settings` are further
    options; a study of several `parts`, by name, has a run for each, with options of its own.
    `tasks` are asked where the user names none, and of those that are generated no more than
    `max_problems`; with `divided`, what may be worded in many ways is a task of its own.

    `drafters` chooses the drafters to compare from those of the stack, none if it `needs` others;
    `drafts` are models that the bundled pair gets for it. `sections` adds what only this study
    shows of a part and task. With `divergences`, the report shows how far draft and target are
    apart where tokens are drafted. `against` is the rule whose curve conditions are compared with
    at equal cost, "" for all.
    """

    name: str
    title: str
    question: str
    rules: str | Sequence[Condition]
    axis: str = ""
    grid: Sequence[str] = ()
    claims: Sequence[PaperClaim] = ()
    tasks_claims: Sequence[PaperClaim] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}})
    tasks: TaskPaths = ()
    max_problems: int | None = None
    divided: bool = False
    drafters: Callable[[Sequence[DrafterStatus]], Sequence[str]] | None = None
    needs: str = ""
    drafts: Mapping[str, Path] = field(default_factory=dict)
    sections: Callable[[Found], Sequence[Section]] | None = None
    divergences: bool = False
    against: str = ""

    def missing(self, drafters: Sequence[DrafterStatus]) -> str:
        """Say why a stack with these drafters cannot answer it; empty if it can."""
        if self.drafters is not None and not self.drafters(drafters):
            return self.needs
        named = [*[MODEL] * self.divergences, *dict(parse_grid(self.grid)).get("drafter", ())]
        unknown = [name for name in named if name not in [d.name for d in drafters]]
        if unknown:
            return f"it needs a draft model (--draft-model) for the drafter {unknown[0]}"
        return ""

    def runs(
        self, o: StudyOptions, drafters: Sequence[DrafterStatus] = ()
    ) -> dict[str, EvalOptions]:
        """Return the runs of `flyspec eval` that answer it on a stack with these drafters, by part.

        A study without parts has one, named "". Options that a part sets are what it is about, so
        the user's do not replace them. Greedy texts have one seed.
        """
        o = self._with_own_tasks(o)
        given: dict[str, Any] = {f.name: getattr(o, f.name) for f in fields(ProblemOptions)}
        given |= {
            "rules": self.rules,
            "num_speculative_tokens": o.num_speculative_tokens,
            "concurrency": o.concurrency,
            **self.settings,
        }
        if o.temperature is not None:
            given["temperature"] = o.temperature
            if o.temperature == 0.0:
                given["seeds"] = 1
        if o.seeds is not None:
            given["seeds"] = o.seeds
        grid = list(self.grid)
        if self.drafters is not None:
            grid.append(f"drafter={','.join(self.drafters(drafters))}")
        found = {}
        for part, own in self.parts.items():
            options = {**given, **own}
            options["rules"] = _parsed(options["rules"])
            found[part] = EvalOptions(grid=parse_grid(grid), **options)
        return found

    def problems(self, o: StudyOptions) -> list[TaskProblems]:
        """Return the tasks of its runs with their problems. Raises `ConfigError`."""
        tasks = read_problems(self._with_own_tasks(o))
        return [part for task in tasks for part in task.divided()] if self.divided else tasks

    def _with_own_tasks(self, o: StudyOptions) -> StudyOptions:
        tasks = o.task if o.task or o.prompt_file is not None else self.tasks
        return replace(o, task=tasks, problems=min(o.problems, self.max_problems or o.problems))


def _parsed(rules: str | Sequence[Condition]) -> Sequence[Condition]:
    return parse_conditions(rules) if isinstance(rules, str) else rules


# --- report -----------------------------------------------------------------------------------


def report_of(
    study: Study,
    parts: Mapping[str, Evaluation],
    tasks: Sequence[TaskProblems],
    target: ModelInfo,
    o: StudyOptions,
    command: str,
    drafters: Sequence[DrafterStatus] = (),
    further: Sequence[Section] = (),
) -> Report:
    """Return the report of a study: its claims, then a section for each part and task."""
    found = [
        Found(
            task.name, of.arms, of.conditions[task.name], of.equal_costs[task.name],
            of.allocations[task.name], of.answered[task.name], task.is_open, part,
        )
        for part, of in parts.items()
        for task in tasks
    ]  # fmt: skip
    sections = [section for of in found for section in _sections(study, of)]
    known = [of for of in found if of.reports]
    if known and (study.claims or study.tasks_claims):
        sections.insert(0, Section(CLAIMS_HEADING, [_CLAIMS], [_claims_table(study, known)]))
    counted = [(f"{of.part}: " if of.part else "") + _counted(of) for of in found]
    used = {arm.drafter for of in parts.values() for arm in of.arms}
    facts = {
        "problems": f"{'; '.join(counted)}; seed {o.problem_seed}",
        "command": f"`{command}`",
        **facts_of(target, [drafter for drafter in drafters if drafter.name in used]),
    }
    return Report(
        {"study": study.name}, [*sections, *further], title=study.title, subtitle=study.question,
        facts=facts,
    )  # fmt: skip


def _counted(found: Found) -> str:
    if not found.reports:
        return f"0 of {found.task}"
    problems, samples = found.reports[0].problems, found.reports[0].samples
    return f"{problems} of {found.task}" + (f", {samples} texts" if samples > problems else "")


def facts_of(target: ModelInfo, drafters: Sequence[DrafterStatus]) -> dict[str, str]:
    """Return the models that a study was made with, by name."""
    found = {
        "target": _described(target),
        "weights": target.weights_fingerprint,
        "numerics": target.numerics,
    }
    for drafter in drafters:
        other = ", another tokenizer than the target's" if drafter.translated else ""
        model = drafter.model
        found[f"drafter {drafter.name}"] = (
            f"{_described(model)}{other}, weights {model.weights_fingerprint}"
            if model
            else "no model"
        )
    return found


def _described(model: ModelInfo) -> str:
    size = f"{model.num_parameters / 1e6:,.2f} M parameters"
    return f"{model.name}, {size}, {model.dtype} on {model.device}"


def _sections(study: Study, found: Found) -> list[Section]:
    """Return what is said of a task, by a part of the study."""
    costs = [cost for cost in found.equal_costs if cost.of.startswith(study.against)]
    times = study.settings.get("concurrency") == 1
    section = task_section(found.title, found.reports, costs, found.allocations, times=times)
    if not found.reports:
        return [section]
    name = re.sub(r"[^a-z0-9]+", "-", found.title.lower())
    plots = [quality_plot(f"{name}-quality", found.arms, {found.title: found.reports})]
    plots += _axis_plot(f"{name}-axis", study.axis, found)
    own = [] if study.sections is None else study.sections(found)
    return [replace(section, plots=plots), *own]


_CLAIMS = (
    "`holds` is `yes` or `no` where the 95 % intervals decide it, or an order is meant, and else "
    "`open`. The papers' models are large; what holds here is what holds for this pair."
)


def _claims_table(study: Study, found: Sequence[Found]) -> FittedTable:
    """Return the study's claims with the findings: on its tasks together, then on each."""
    rows = [_claim_row(claim, found) for claim in study.tasks_claims]
    for of in found:
        label = f"{of.title}: " if len(found) > 1 else ""
        for claim in study.claims:
            text, *rest = _claim_row(claim, of)
            rows.append([label + text, *rest])
    return make_table(["claim", "source", "holds", "figures here"], rows, left=4)


def _claim_row(claim: PaperClaim, found: Any) -> list[str]:
    try:
        finding = claim.check(found)
    except LookupError:
        finding = ClaimFinding(None, "a condition has no texts yet")
    return [claim.text, claim.source, VERDICTS[finding.holds], finding.figures]


def _axis_plot(name: str, axis: str, found: Found) -> list[Plot]:
    """Return the plot over the study's axis; none if it has no axis, or no line two points.

    A line is the conditions that differ in the axis alone. Rounds of several drafters take
    different times, so over drafters there is the speed as well.
    """
    lines: dict[str, list[tuple[Any, ConditionReport]]] = {}
    for arm, report in found.pairs:
        value = value_of(arm, axis) if axis and arm.k != 0 else None
        if value is not None:
            shown = {f"{value:g}" if isinstance(value, float) else str(value), str(value)}
            own = [p for p in report.condition.split(", ") if p.rpartition(" = ")[2] not in shown]
            lines.setdefault(", ".join(own), []).append((value, report))
    if all(len(points) < 2 for points in lines.values()):
        return []
    panels: list[tuple[str, Callable[[ConditionReport], Interval | None]]] = [
        (quality_label(found.reports), quality_of),
        ("tokens per round", lambda report: report.mean_accepted_tokens_interval),
    ]
    if axis == "drafter":
        panels.append((f"tokens per second, relative to {PLAIN}", lambda report: report.speedup))
    values = list(dict.fromkeys(value for points in lines.values() for value, _ in points))
    words = isinstance(values[0], str)

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, len(panels))
        for ax, (label, measured) in zip(axes, panels, strict=True):
            for (line, points), color, marker in zip(
                lines.items(), cycle(COLORS), cycle(MARKERS), strict=False
            ):
                drawn = [
                    (float(values.index(x) if words else x), y)
                    for x, report in points
                    if (y := measured(report))
                ]
                draw_intervals(ax, drawn, label=line, color=color, marker=marker)
            ax.set(xlabel="K" if axis == "k" else axis, ylabel=label)
            if words:
                ax.set_xticks(range(len(values)), values)
            elif 0 < _WIDE * min(values) < max(values):
                ax.set_xscale("log")
                ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes[-1].legend()

    inches = (13.5 if axis == "drafter" else 10.5, 4.0)
    return [Plot(name, f"Quality and speed over `{axis}`.", draw, inches)]
