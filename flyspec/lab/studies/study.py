"""A study: a question, the conditions that answer it, and what others report of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flyspec.bench.conditions import parse_conditions
from flyspec.lab.arms import Arm, parse_grid
from flyspec.lab.compare import ConditionReport
from flyspec.lab.curves import EqualCost
from flyspec.lab.options import EvalOptions
from flyspec.lab.studies.options import StudyOptions


class ClaimFinding(NamedTuple):
    """Whether a claim holds here, None if the figures do not decide it, and the figures."""

    holds: bool | None
    figures: str


class Found:
    """A study's conditions with their reports, to be asked for by what they are."""

    def __init__(
        self,
        task: str,
        arms: Sequence[Arm],
        reports: Sequence[ConditionReport],
        equal_costs: Sequence[EqualCost] = (),
    ) -> None:
        self.task, self.equal_costs = task, equal_costs
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
    plots have across, a field of `Rule`, `k` or `drafter`. `settings` are further options.
    """

    name: str
    title: str
    question: str
    rules: str
    axis: str
    grid: Sequence[str] = ()
    claims: Sequence[PaperClaim] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    def run(self, o: StudyOptions) -> EvalOptions:
        """Return the run of `flyspec eval` that answers it."""
        given: dict[str, Any] = {
            "num_speculative_tokens": o.num_speculative_tokens,
            "problems": o.problems,
            "problem_seed": o.problem_seed,
            "concurrency": o.concurrency,
            **self.settings,
        }
        return EvalOptions(rules=parse_conditions(self.rules), grid=parse_grid(self.grid), **given)
