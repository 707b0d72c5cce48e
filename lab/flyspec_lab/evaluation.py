"""`flyspec eval` once its stacks run: arms, samples, and findings on each task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flyspec.client import AsyncClient
from flyspec.progress import error_console
from flyspec_lab import compare
from flyspec_lab.answered import Answered
from flyspec_lab.arms import Arm, controls_of, make_arms, rival_arm
from flyspec_lab.compare import ConditionReport
from flyspec_lab.curves import EqualCost, equal_costs
from flyspec_lab.interrupting import check_reached
from flyspec_lab.options import EvalOptions
from flyspec_lab.problems import TaskProblems
from flyspec_lab.run import Progressed, ServedModel, make_samples, wanted_samples
from flyspec_lab.run_directory import RunSettings, model_facts, open_run


@dataclass(frozen=True)
class Found:
    """The conditions on a task with their reports, to be asked for by what they are.

    `answered` are their texts; `is_open`: whether answers may be worded in many ways.
    """

    task: str
    arms: Sequence[Arm]
    reports: Sequence[ConditionReport]
    equal_costs: Sequence[EqualCost] = ()
    answered: Answered | None = None
    is_open: bool = False

    @classmethod
    def on(cls, answered: Answered, arms: Sequence[Arm], is_open: bool = False) -> Found:
        """Compare the texts of a task."""
        reports, costs = compare.report(answered), equal_costs(answered)
        return cls(answered.task, arms, reports, costs, answered, is_open)

    @cached_property
    def pairs(self) -> list[tuple[Arm, ConditionReport]]:
        """The conditions that have texts."""
        by_name = {report.condition: report for report in self.reports}
        return [(arm, by_name[arm.name]) for arm in self.arms if arm.name in by_name]

    def of(self, rule: str, **parameters: Any) -> list[tuple[Arm, ConditionReport]]:
        """Return the conditions by this preset with these parameters; `drafter` is one as well."""
        wanted = {"name": rule, **parameters}
        return [
            (arm, report)
            for arm, report in self.pairs
            if arm.k != 0
            and all(
                getattr(arm if name == "drafter" else arm.rule, name) == value
                for name, value in wanted.items()
            )
        ]

    def one(self, rule: str, **parameters: Any) -> ConditionReport:
        """Return the report of the only such condition. Raises `LookupError` if it has no texts."""
        found = self.of(rule, **parameters)
        if not found:
            raise LookupError(rule)
        ((_, report),) = found
        return report


async def run_evaluation(
    o: EvalOptions,
    tasks: Sequence[TaskProblems],
    client: AsyncClient,
    rival: ServedModel | None,
    drafters: Mapping[str, str],
    output: Path | None,
    resume: bool,
) -> tuple[Progressed, list[Found]]:
    """Make what is missing of a run; return how many samples there are, and findings by task.

    `drafters` are fingerprints that are known. After Ctrl-C, what there is is compared. Raises
    `ConfigError`.
    """
    models = await client.list_models()
    target = ServedModel(client, models.target)
    conditions = (*o.conditions, *(controls_of(o.conditions) if o.controls else ()))
    drafter = o.drafter or next(iter(models.drafters), "")
    arms = make_arms(conditions, o.grid, o.num_speculative_tokens, drafter, models.rules)
    served = {"target": target}
    if rival is not None:
        arms, served = [*arms, rival_arm(rival.model.name)], {**served, "rival": rival}
    settings: RunSettings = {
        "sampling": {name: getattr(o, name) for name in ("temperature", "top_p", "log_likelihood")},
        "models": {name: model_facts(stack.model) for name, stack in served.items()},
        "drafters": drafters,
        "tasks": {task.name: task.facts(o) for task in tasks},
    }
    wanted = wanted_samples(o, tasks, arms, target.model, rival.model if rival else None)
    with open_run(output, settings, resume) as file:
        problems = ", ".join(f"{task.name} ({len(task.problems)} problems)" for task in tasks)
        seeds = f", {o.seeds} texts of each" if o.seeds > 1 else ""
        error_console().print(
            f"{problems}{seeds}: {len(arms)} conditions on {target.model.name}", markup=False
        )
        progressed = await make_samples(o, wanted, target, rival, file)
        check_reached(progressed.found + progressed.made)
        rows = list(file.read())
    return progressed, [
        Found.on(Answered(task.name, arms, wanted, rows), arms, task.is_open) for task in tasks
    ]
