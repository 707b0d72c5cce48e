"""A study: a question, the conditions that answer it, and what others report of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from flyspec.cli.conditions import Condition
from flyspec.rules.presets import RULE_PRESETS
from flyspec.values.admin import DrafterStatus
from flyspec_lab.answered import Answered
from flyspec_lab.arms import Arm, parse_grid
from flyspec_lab.bench.conditions import parse_conditions
from flyspec_lab.compare import ConditionReport
from flyspec_lab.curves import AllocationLead, EqualCost
from flyspec_lab.options import EvalOptions, ProblemOptions, TaskPaths
from flyspec_lab.problems import TaskProblems, read_problems
from flyspec_lab.statistics import Interval
from flyspec_lab.studies.options import StudyOptions
from flyspec_lab.studies.page import PageSection

T = TypeVar("T")
MODEL = "model"
"""The kind of a drafter that is a draft model, and the name of a stack's own."""


class ClaimFinding(NamedTuple):
    """Whether a claim holds here, None if the figures do not decide it, and the figures."""

    holds: bool | None
    figures: str


def with_bounds(estimate: Interval | None, form: str) -> str:
    """Return an estimate with its interval, as a claim's figures show it."""
    if estimate is None:
        return "unknown"
    value, low, high = (f"{part:{form}}" for part in (estimate.value, estimate.low, estimate.high))
    return f"{value} ({low} to {high})"


class Found:
    """A study's conditions on a task with their reports, to be asked for by what they are.

    `part` is the part of the study that they are of, `answered` their texts. `is_open`: whether the
    task's answers may be worded in many ways. `label` is what tells it from what else the study has
    found; empty if that is all.
    """

    def __init__(
        self,
        task: str,
        arms: Sequence[Arm],
        reports: Sequence[ConditionReport],
        equal_costs: Sequence[EqualCost] = (),
        allocations: Sequence[AllocationLead] = (),
        answered: Answered | None = None,
        is_open: bool = False,
        part: str = "",
        label: str = "",
    ) -> None:
        self.task, self.arms, self.reports = task, arms, reports
        self.equal_costs, self.allocations, self.answered = equal_costs, allocations, answered
        self.is_open, self.part, self.label = is_open, part, label
        by_name = {report.condition: report for report in reports}
        self.pairs = [(arm, by_name[arm.name]) for arm in arms if arm.name in by_name]

    @property
    def title(self) -> str:
        """The task, and the study's part if it has several."""
        return f"{self.task}, {self.part}" if self.part else self.task

    @property
    def slug(self) -> str:
        """The title as part of a file's name."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower())

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


def _parsed(rules: str | Sequence[Condition]) -> Sequence[Condition]:
    return parse_conditions(rules) if isinstance(rules, str) else rules


def value_of(arm: Arm, name: str) -> Any:
    """Return a parameter of a condition's rule, its K (`k`) or its drafter."""
    return getattr(arm, name) if name in ("k", "drafter") else getattr(arm.rule, name)


@dataclass(frozen=True)
class PaperClaim(Generic[T]):
    """What a source reports; `check` says whether it holds here, by which figures.

    It gets what was found on a task; of a claim about tasks against each other, on all of them.
    """

    text: str
    source: str
    check: Callable[[T], ClaimFinding]


@dataclass(frozen=True)
class Study:
    """One question about rules.

    `rules` and `grid` are as on the command line of `flyspec eval`. `axis` is the parameter that
    plots have across, a field of `Rule`, `k` or `drafter`, "" for none. `settings` are further
    options; a study of several `parts`, by name, has a run for each, with options of its own.
    `tasks` are asked where the user names none, and of those that are generated no more than
    `max_problems`; with `divided`, what may be worded in many ways is a task of its own.

    `drafters` chooses the drafters to compare from those of the stack, none if it `needs` others;
    `drafts` are models that the bundled pair gets for it.

    `sections` adds what only this study shows of a part and task; `overview` of all of them. With
    `divergences`, the report shows how far draft and target are apart where tokens are drafted.
    `against` is the rule whose curve conditions are compared with at equal cost, "" for all.
    """

    name: str
    title: str
    question: str
    rules: str | Sequence[Condition]
    axis: str = ""
    grid: Sequence[str] = ()
    claims: Sequence[PaperClaim[Found]] = ()
    tasks_claims: Sequence[PaperClaim[Sequence[Found]]] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}})
    tasks: TaskPaths = ()
    max_problems: int | None = None
    divided: bool = False
    drafters: Callable[[Sequence[DrafterStatus]], Sequence[str]] | None = None
    needs: str = ""
    drafts: Mapping[str, Path] = field(default_factory=dict)
    sections: Callable[[Found], Sequence[PageSection]] | None = None
    overview: Callable[[Sequence[Found]], PageSection] | None = None
    divergences: bool = False
    against: str = ""

    def missing(self, drafters: Sequence[DrafterStatus], rules: Sequence[str]) -> str:
        """Say why a stack with these drafters and rules cannot answer it; empty if it can."""
        named_rules = {rule.name for condition in _parsed(self.rules) for rule in condition.rules}
        if any(RULE_PRESETS[name].hidden_layers for name in named_rules - {*rules}):
            return "it needs a judge of this target (flyspec autojudge train, --autojudge-file)"
        if self.drafters is not None and not self.drafters(drafters):
            return self.needs
        named = dict(parse_grid(self.grid)).get("drafter", ())
        if self.divergences:
            named = (MODEL, *named)
        unknown = [name for name in named if name not in [d.name for d in drafters]]
        if unknown:
            return f"it needs a draft model (--draft-model) for the drafter {unknown[0]}"
        return ""

    def runs(
        self, o: StudyOptions, drafters: Sequence[DrafterStatus] = ()
    ) -> dict[str, EvalOptions]:
        """Return the runs of `flyspec eval` that answer it on a stack with these drafters, by part.

        A study without parts has one, named "".
        """
        return {part: self.run(o, drafters, part) for part in self.parts}

    def run(
        self, o: StudyOptions, drafters: Sequence[DrafterStatus] = (), part: str | None = None
    ) -> EvalOptions:
        """Return the run of a part, or of the first. Greedy texts have one seed.

        Options that a part sets are what it is about, so the user's do not replace them.
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
        given |= self.parts[next(iter(self.parts)) if part is None else part]
        given["rules"] = _parsed(given["rules"])
        grid = list(self.grid)
        if self.drafters is not None:
            grid.append(f"drafter={','.join(self.drafters(drafters))}")
        return EvalOptions(grid=parse_grid(grid), **given)

    def problems(self, o: StudyOptions) -> list[TaskProblems]:
        """Return the tasks of its runs with their problems. Raises `ConfigError`."""
        tasks = read_problems(self._with_own_tasks(o))
        return [part for task in tasks for part in task.divided()] if self.divided else tasks

    def _with_own_tasks(self, o: StudyOptions) -> StudyOptions:
        tasks = o.task if o.task or o.prompt_file is not None else self.tasks
        return replace(o, task=tasks, problems=min(o.problems, self.max_problems or o.problems))
