"""A study: a question, the conditions that answer it, and what others report of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flyspec.bench.conditions import Condition, parse_conditions
from flyspec.lab.allocation import AllocationLead
from flyspec.lab.arms import Arm, parse_grid
from flyspec.lab.compare import Answered, ConditionReport, EqualCost
from flyspec.lab.options import EvalOptions
from flyspec.lab.studies.options import StudyOptions
from flyspec.lab.studies.page import PageSection


class ClaimFinding(NamedTuple):
    """Whether a claim holds here, None if the figures do not decide it, and the figures."""

    holds: bool | None
    figures: str


class Found:
    """A study's conditions with their reports, to be asked for by what they are.

    `part` is the study's part that they are of, `answered` their texts.
    """

    def __init__(
        self,
        task: str,
        arms: Sequence[Arm],
        reports: Sequence[ConditionReport],
        equal_costs: Sequence[EqualCost] = (),
        allocations: Sequence[AllocationLead] = (),
        answered: Answered | None = None,
        part: str = "",
    ) -> None:
        self.task, self.equal_costs, self.allocations = task, equal_costs, allocations
        self.answered, self.part = answered, part
        by_name = {report.condition: report for report in reports}
        self.pairs = [(arm, by_name[arm.name]) for arm in arms if arm.name in by_name]

    def of(self, rule: str, **parameters: Any) -> list[tuple[Arm, ConditionReport]]:
        """Return the conditions by this preset with these parameters; `k` is K."""
        wanted = {"name": rule, **parameters}
        return [
            (arm, report)
            for arm, report in self.pairs
            if arm.k != 0 and all(value_of(arm, name) == wanted[name] for name in wanted)
        ]

    def one(self, rule: str, **parameters: Any) -> ConditionReport:
        """Return the report of the only such condition."""
        ((_, report),) = self.of(rule, **parameters)
        return report


def value_of(arm: Arm, name: str) -> Any:
    """Return a parameter of a condition's rule, its K (`k`) or its drafter."""
    return getattr(arm, name) if name in ("k", "drafter") else getattr(arm.rule, name)


@dataclass(frozen=True)
class PaperClaim:
    """What a source reports; `check` says whether it holds here, by which figures."""

    text: str
    source: str
    check: Callable[[Found], ClaimFinding]


@dataclass(frozen=True)
class Study:
    """One question about rules.

    `rules` and `grid` are as on the command line of `flyspec eval`. `axis` is the parameter that
    plots have across, a field of `Rule`, `k` or `drafter`. `settings` are further options. A study
    of several `parts`, by name, has a run for each, with options of its own. `analyse` returns what
    its report says beyond what all reports do, for each part. With `divergences`, the report shows
    how far draft and target are apart where tokens are drafted. `against` is the rule whose curve
    conditions are compared with at equal cost, "" for all.
    """

    name: str
    title: str
    question: str
    rules: str | Sequence[Condition]
    axis: str
    grid: Sequence[str] = ()
    claims: Sequence[PaperClaim] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}})
    analyse: Callable[[Found], Sequence[PageSection]] | None = None
    divergences: bool = False
    against: str = ""

    def run(self, o: StudyOptions, **of_part: Any) -> EvalOptions:
        """Return a run of `flyspec eval` that answers it."""
        rules = parse_conditions(self.rules) if isinstance(self.rules, str) else tuple(self.rules)
        given: dict[str, Any] = {
            "rules": rules,
            "num_speculative_tokens": o.num_speculative_tokens,
            "problems": o.problems,
            "problem_seed": o.problem_seed,
            "concurrency": o.concurrency,
            **self.settings,
            **of_part,
        }
        return EvalOptions(grid=parse_grid(self.grid), **given)

    def runs(self, o: StudyOptions) -> dict[str, EvalOptions]:
        """Return the runs of all its parts; a study without parts has one, named ""."""
        return {part: self.run(o, **settings) for part, settings in self.parts.items()}
