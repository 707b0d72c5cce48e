"""The problems of a run: those of the tasks that were named, or of a prompt file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyspec.errors import ConfigError
from flyspec.spelling import did_you_mean
from flyspec_lab.options import ProblemOptions
from flyspec_lab.run_directory import digest
from flyspec_lab.tasks import TASKS, Problem, Task
from flyspec_lab.tasks.open_ended import OpenEnded


@dataclass(frozen=True)
class TaskProblems:
    """A task under the name that it has in this run, with its problems."""

    name: str
    task: Task
    problems: Sequence[Problem]

    @property
    def is_open(self) -> bool:
        """True if all of it may be worded in many ways."""
        return all(map(self.task.is_open, self.problems))

    def facts(self, o: ProblemOptions) -> dict[str, Any]:
        """Identity of its samples, but for the number of problems."""
        task = self.task
        return {
            "task": task.name,
            "sha256": digest(task.path),
            "problem_seed": task.seed,
            "max_tokens": o.max_tokens or task.max_tokens,
            "stop": list(task.stop),
            "chat": task.chat if isinstance(task, OpenEnded) else None,
        }


def read_problems(o: ProblemOptions) -> list[TaskProblems]:
    """Return the tasks that the options name, with their problems. Raises `ConfigError`."""
    default = [] if o.prompt_file else [("word_problems", None)]
    named = [(name, _task(name, path, o)) for name, path in o.task or default]
    if o.prompt_file is not None:
        file = OpenEnded(o.prompt_file, chat=o.chat, limit=o.limit)
        named.append((Path(o.prompt_file).name.partition(".")[0] or "prompts", file))
    names = [name for name, _ in named]
    found: dict[str, TaskProblems] = {}
    for name, task in named:
        # One task with several files, such as languages: their names tell them apart.
        own = f"{name}/{Path(task.path).name}" if names.count(name) > 1 and task.path else name
        if own in found:
            raise ConfigError(f"two tasks are named {own!r}; rename one of the files")
        problems = task.problems()
        if not problems:
            raise ConfigError(f"{own}: has no problems")
        found[own] = TaskProblems(own, task, problems)
    return list(found.values())


def _task(name: str, path: str | None, o: ProblemOptions) -> Task:
    if name not in TASKS:
        raise ConfigError(
            f"--task {name}: must be one of {', '.join(TASKS)}{did_you_mean(name, TASKS)}"
        )
    kind = TASKS[name]
    return kind(
        path,
        limit=o.limit if kind.needs_path else o.problems,
        seed=o.problem_seed,
        allow_code_execution=o.allow_code_execution,
    )
