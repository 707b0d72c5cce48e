"""A study: a question, the conditions that answer it, and what others report of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from flyspec.bench.conditions import parse_conditions
from flyspec.lab.arms import Arm, parse_grid
from flyspec.lab.compare import ConditionReport, EqualCost
from flyspec.lab.options import EvalOptions, ProblemOptions, TaskPaths
from flyspec.lab.problems import TaskProblems, read_problems
from flyspec.lab.studies.options import StudyOptions
from flyspec.lab.studies.page import PageSection
from flyspec.values.admin import DrafterStatus

T = TypeVar("T")


class ClaimFinding(NamedTuple):
    """Whether a claim holds here, None if the figures do not decide it, and the figures."""

    holds: bool | None
    figures: str


class Found:
    """A study's conditions on a task with their reports, to be asked for by what they are.

    `is_open`: whether the task's answers may be worded in many ways.
    """

    def __init__(
        self,
        task: str,
        arms: Sequence[Arm],
        reports: Sequence[ConditionReport],
        equal_costs: Sequence[EqualCost] = (),
        is_open: bool = False,
    ) -> None:
        self.task, self.equal_costs, self.is_open = task, equal_costs, is_open
        self.reports = reports
        by_name = {report.condition: report for report in reports}
        self.pairs = [(arm, by_name[arm.name]) for arm in arms if arm.name in by_name]

    @property
    def slug(self) -> str:
        """The task's name as part of a file's name."""
        return re.sub(r"[^a-z0-9]+", "-", self.task.lower())

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
    plots have across, a field of `Rule`, `k` or `drafter`. `settings` are further options.
    `tasks` are asked where the user names none, and of those that are generated no more than
    `max_problems`; with `divided`, what may be worded in many ways is a task of its own.
    `section` adds what only this study shows of a task; `overview` of all of them. `drafters`
    chooses the drafters to compare from those of the stack, none if it `needs` others; `drafts` are
    models that the bundled pair gets for it.
    """

    name: str
    title: str
    question: str
    rules: str
    axis: str
    grid: Sequence[str] = ()
    claims: Sequence[PaperClaim[Found]] = ()
    tasks_claims: Sequence[PaperClaim[Sequence[Found]]] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    tasks: TaskPaths = ()
    max_problems: int | None = None
    divided: bool = False
    section: Callable[[Found], PageSection] | None = None
    overview: Callable[[Sequence[Found]], PageSection] | None = None
    drafters: Callable[[Sequence[DrafterStatus]], Sequence[str]] | None = None
    needs: str = ""
    drafts: Mapping[str, Path] = field(default_factory=dict)

    def missing(self, drafters: Sequence[DrafterStatus]) -> str:
        """Say why a stack with these drafters cannot answer it; empty if it can."""
        if self.drafters is not None and not self.drafters(drafters):
            return self.needs
        named = dict(parse_grid(self.grid)).get("drafter", ())
        unknown = [name for name in named if name not in [d.name for d in drafters]]
        if unknown:
            return f"it needs a draft model (--draft-model) for the drafter {unknown[0]}"
        return ""

    def run(self, o: StudyOptions, drafters: Sequence[DrafterStatus] = ()) -> EvalOptions:
        """Return the run of `flyspec eval` that answers it on a stack with these drafters.

        Greedy texts have one seed.
        """
        o = self._with_own_tasks(o)
        given: dict[str, Any] = {f.name: getattr(o, f.name) for f in fields(ProblemOptions)}
        given |= {
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
        return EvalOptions(rules=parse_conditions(self.rules), grid=parse_grid(grid), **given)

    def problems(self, o: StudyOptions) -> list[TaskProblems]:
        """Return the tasks of its run with their problems. Raises `ConfigError`."""
        tasks = read_problems(self._with_own_tasks(o))
        return [part for task in tasks for part in task.divided()] if self.divided else tasks

    def _with_own_tasks(self, o: StudyOptions) -> StudyOptions:
        tasks = o.task if o.task or o.prompt_file is not None else self.tasks
        return replace(o, task=tasks, problems=min(o.problems, self.max_problems or o.problems))
