"""A study: a question, the conditions that answer it, the claims of papers, and its report."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from flyspec.cli.conditions import Condition
from flyspec.cli.stack_options import StackOptions
from flyspec.tables import make_table
from flyspec.values.admin import DrafterStatus, ModelInfo
from flyspec_lab.arms import Grid, parse_grid
from flyspec_lab.evaluation import Found
from flyspec_lab.options import EvalOptions, ProblemOptions, StudyOptions, TaskPaths
from flyspec_lab.plots import quality_plot
from flyspec_lab.problems import TaskProblems, read_problems
from flyspec_lab.report import Report, Section
from flyspec_lab.statistics import Interval
from flyspec_lab.tables import task_section

CLAIMS_HEADING = "What papers report"
MODEL = "model"
"""The kind of a drafter that is a draft model, and the name of a stack's own."""
_VERDICTS = {True: "yes", False: "no", None: "open"}
_CLAIMS = (
    "`holds` is `yes` or `no` where the 95 % intervals decide it, or an order is meant, and else "
    "`open`. The papers' models are large; what holds here is what holds for this pair."
)


class ClaimFinding(NamedTuple):
    """The verdict on a claim, None if the figures do not decide it, and the figures."""

    holds: bool | None
    figures: str


@dataclass(frozen=True)
class PaperClaim:
    """A source's claim; `check` decides by figures whether it holds here.

    It gets the findings on a task, or on all tasks for a claim about tasks against each other.
    Raises `LookupError` if there is nothing to decide by.
    """

    text: str
    source: str
    check: Callable[[Any], ClaimFinding]

    def row(self, found: Any, label: str = "") -> list[str]:
        """Return it as a row of the table of claims."""
        try:
            finding = self.check(found)
        except LookupError:
            finding = ClaimFinding(None, "a condition has no texts yet")
        return [label + self.text, self.source, _VERDICTS[finding.holds], finding.figures]


def decided(yes: object, no: object, figures: str) -> ClaimFinding:
    """Return a finding: that a claim holds, or else that it does not, if either is shown."""
    return ClaimFinding(True if yes else False if no else None, figures)


def with_bounds(estimate: Interval | None, form: str, less: float = 0.0) -> str:
    """Return an estimate less a number, with its interval, as a claim's figures show it."""
    if estimate is None:
        return "unknown"
    parts = estimate.value, estimate.low, estimate.high
    value, low, high = (f"{part - less:{form}}" for part in parts)
    return f"{value} ({low} to {high})"


@dataclass(frozen=True)
class Study:
    """One question about rules.

    `grid` is as on the command line of `flyspec eval`, `settings` are further options. `tasks` are
    asked where the user names none, with no more than `max_problems` of those that are generated.

    With `draft_models`, it compares all draft models of the stack; the bundled pair gets these
    further ones for it, by name. `of_models` returns what it measures of target and draft model
    without a stack, before that starts.
    """

    name: str
    question: str
    rules: Sequence[Condition]
    grid: Sequence[str] = ()
    claims: Sequence[PaperClaim] = ()
    tasks_claims: Sequence[PaperClaim] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    tasks: TaskPaths = ()
    max_problems: int | None = None
    draft_models: Mapping[str, Path] = field(default_factory=dict)
    of_models: (
        Callable[[Sequence[TaskProblems], StackOptions, StudyOptions], Sequence[Section]] | None
    ) = None

    def _grid_on(self, drafters: Sequence[DrafterStatus]) -> Grid:
        """Return the grid on a stack with these drafters. Raises `LookupError` if it lacks some."""
        grid = dict(parse_grid(self.grid))
        if self.draft_models:
            sizes = {
                d.name: d.model.num_parameters for d in drafters if d.kind == MODEL and d.model
            }
            if len(sizes) < 2:
                raise LookupError(
                    "it needs several draft models (--draft-model, --draft NAME=MODEL)"
                )
            grid["drafter"] = tuple(sorted(sizes, key=lambda name: sizes[name]))
        known = {drafter.name for drafter in drafters}
        for name in (*[MODEL] * ("rival" in self.settings), *grid.get("drafter", ())):
            if name not in known:
                raise LookupError(f"it needs a draft model (--draft-model) for the drafter {name}")
        return tuple(grid.items())

    def run(self, o: StudyOptions, drafters: Sequence[DrafterStatus]) -> EvalOptions:
        """Return the run of `flyspec eval` that answers it on a stack with these drafters.

        Greedy texts have one seed. Raises `LookupError` with what the stack lacks.
        """
        own = self._with_own_tasks(o)
        given: dict[str, Any] = {
            **{f.name: getattr(own, f.name) for f in fields(ProblemOptions)},
            "rules": tuple(self.rules),
            "grid": self._grid_on(drafters),
            "num_speculative_tokens": o.num_speculative_tokens,
            "concurrency": o.concurrency,
            **self.settings,
        }
        if o.temperature is not None:
            given |= {"temperature": o.temperature}
        if o.seeds is not None or o.temperature == 0.0:
            given |= {"seeds": o.seeds or 1}
        return EvalOptions(**given)

    def problems(self, o: StudyOptions) -> list[TaskProblems]:
        """Return the tasks of its runs with their problems. Raises `ConfigError`."""
        return read_problems(self._with_own_tasks(o))

    def _with_own_tasks(self, o: StudyOptions) -> StudyOptions:
        tasks = o.task if o.task or o.prompt_file is not None else self.tasks
        most = self.max_problems or o.problems
        return replace(o, task=tasks, problems=min(o.problems, most))

    def report(
        self, sections: Sequence[Section], claims: Sequence[Sequence[str]], facts: Mapping[str, str]
    ) -> Report:
        """Return the report: the claims, if there are any, then the sections."""
        shown = list(sections)
        if claims:
            table = make_table(["claim", "source", "holds", "figures here"], claims, left=4)
            shown.insert(0, Section(CLAIMS_HEADING, [_CLAIMS], [table]))
        return Report({"study": self.name}, shown, title=self.question, facts=facts)


def facts_of(
    command: str,
    tasks: Sequence[TaskProblems],
    o: StudyOptions,
    target: ModelInfo,
    drafters: Sequence[DrafterStatus],
) -> dict[str, str]:
    """Return what a study was made with, by name."""
    found = {
        "problems": f"{'; '.join(f'{len(t.problems)} of {t.name}' for t in tasks)}; seed "
        f"{o.problem_seed}",
        "command": f"`{command}`",
        "target": _described(target),
        "numerics": target.numerics,
    }
    for drafter in drafters:
        other = ", another tokenizer than the target's" if drafter.translated else ""
        described = _described(drafter.model) + other if drafter.model else "no model"
        found[f"drafter {drafter.name}"] = described
    return found


def _described(model: ModelInfo) -> str:
    return (
        f"{model.name}, {model.num_parameters / 1e6:,.2f} M parameters, {model.dtype} on "
        f"{model.device}, weights {model.weights_fingerprint}"
    )


def evaluated(study: Study, found: Sequence[Found]) -> tuple[list[Section], list[list[str]]]:
    """Return a section for each task, and the claims: on all tasks, then on each."""
    known = [of for of in found if of.reports]
    claims = [claim.row(known) for claim in study.tasks_claims if known]
    for of in known:
        label = f"{of.task}: " if len(known) > 1 else ""
        claims += [claim.row(of, label) for claim in study.claims]
    times = study.settings.get("concurrency") == 1
    return [_section(of, times) for of in found], claims


def _section(found: Found, times: bool) -> Section:
    """Return what is said of a task. Where chance was compared, conditions are shown against it
    alone at equal cost."""
    costs = [cost for cost in found.equal_costs if cost.of.startswith("random")]
    section = task_section(replace(found, equal_costs=costs or found.equal_costs), times)
    name = re.sub(r"[^a-z0-9]+", "-", f"{found.task.lower()}-quality")
    return replace(section, plots=[quality_plot(name, [found])] if found.reports else [])
