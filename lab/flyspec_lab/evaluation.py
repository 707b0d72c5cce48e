"""`flyspec eval` once its stacks run: arms, samples and their comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flyspec.client import Models
from flyspec.concurrency import check_reached
from flyspec.progress import error_console
from flyspec_lab import compare
from flyspec_lab.answered import Answered
from flyspec_lab.arms import Arm, controls_of, make_arms, rival_arm
from flyspec_lab.compare import ConditionReport
from flyspec_lab.curves import AllocationLead, EqualCost, allocation_leads, equal_costs
from flyspec_lab.options import EvalOptions
from flyspec_lab.problems import TaskProblems
from flyspec_lab.run import Progressed, ServedModel, make_samples, wanted_samples
from flyspec_lab.run_directory import RunSettings, model_facts, open_run


@dataclass(frozen=True)
class Evaluation:
    """The arms of a run, how their samples went, and findings by task."""

    arms: Sequence[Arm]
    progressed: Progressed
    answered: Mapping[str, Answered]
    conditions: Mapping[str, Sequence[ConditionReport]]
    equal_costs: Mapping[str, Sequence[EqualCost]]
    allocations: Mapping[str, Sequence[AllocationLead]]


async def run_evaluation(
    o: EvalOptions,
    tasks: Sequence[TaskProblems],
    models: Models,
    target: ServedModel,
    rival: ServedModel | None,
    drafters: Mapping[str, str],
    output: Path | None,
    resume: bool,
) -> Evaluation:
    """Make what is missing of a run, and compare. `drafters` are fingerprints that are known.

    After Ctrl-C, what there is is compared. Raises `ConfigError`.
    """
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
    answered = {task.name: Answered(task.name, arms, wanted, rows) for task in tasks}
    return compared(arms, progressed, answered, o.conditions[0].name)


def compared(
    arms: Sequence[Arm], progressed: Progressed, answered: Mapping[str, Answered], first: str
) -> Evaluation:
    """Compare the texts of each task, with those of the condition named `first` as well."""
    return Evaluation(
        arms,
        progressed,
        answered,
        {name: compare.report(of, first) for name, of in answered.items()},
        {name: equal_costs(of) for name, of in answered.items()},
        {name: allocation_leads(of) for name, of in answered.items()},
    )
