"""A study: a question, the conditions that answer it, and what others report of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Generic, NamedTuple, TypeVar

from flyspec.bench.conditions import parse_conditions
from flyspec.lab.arms import Arm, parse_grid
from flyspec.lab.compare import ConditionReport, EqualCost
from flyspec.lab.options import EvalOptions, ProblemOptions, TaskPaths
from flyspec.lab.problems import TaskProblems, read_problems
from flyspec.lab.studies.options import StudyOptions
from flyspec.lab.studies.page import PageSection

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
    `max_problems`; with `in_parts`, what may be worded in many ways is a task of its own.
    `section` adds what only this study shows of a task; `overview` of all of them.
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
    in_parts: bool = False
    section: Callable[[Found], PageSection] | None = None
    overview: Callable[[Sequence[Found]], PageSection] | None = None

    def run(self, o: StudyOptions) -> EvalOptions:
        """Return the run of `flyspec eval` that answers it. Greedy texts have one seed."""
        given: dict[str, Any] = {f.name: getattr(o, f.name) for f in fields(ProblemOptions)}
        given |= {
            "num_speculative_tokens": o.num_speculative_tokens,
            "concurrency": o.concurrency,
            **self.settings,
        }
        if not o.task and o.prompt_file is None:
            given["task"] = self.tasks
        if self.max_problems is not None:
            given["problems"] = min(o.problems, self.max_problems)
        if o.temperature is not None:
            given["temperature"] = o.temperature
            if o.temperature == 0.0:
                given["seeds"] = 1
        if o.seeds is not None:
            given["seeds"] = o.seeds
        return EvalOptions(rules=parse_conditions(self.rules), grid=parse_grid(self.grid), **given)

    def problems(self, o: StudyOptions) -> list[TaskProblems]:
        """Return the tasks of its run with their problems. Raises `ConfigError`."""
        tasks = read_problems(self.run(o))
        return [part for task in tasks for part in task.parts()] if self.in_parts else tasks
