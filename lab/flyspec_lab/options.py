"""Options of `flyspec eval` and `flyspec study`, declared as in `flyspec_lab.bench.options`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from flyspec.cli.conditions import Condition
from flyspec.flags import Flag
from flyspec.prompts import PromptLimit
from flyspec.speculation_length import AUTO
from flyspec.values.requests import request_flag
from flyspec_lab.arms import Grid, parse_grid
from flyspec_lab.bench.conditions import CONDITIONS, parse_conditions
from flyspec_lab.bench.options import RULES_HELP, Chat, Drafter, KOrAuto, ProblemSeed

_request = partial(request_flag, group=None)
_OF_STUDY = "the study's own"
TaskPaths = Sequence[tuple[str, str | None]]


def read_tasks(texts: Sequence[str]) -> TaskPaths:
    """Parse NAME or NAME=PATH texts. Raises `ValueError`."""
    found = []
    for text in texts:
        name, equals, path = text.partition("=")
        if not name or (equals and not path):
            raise ValueError(f"{text!r}: must be NAME=PATH, such as gsm8k=test.jsonl")
        found.append((name, path or None))
    return tuple(found)


# fmt: off
def task_flag(default: str) -> Flag:
    return Flag(
        "Task, with the file or directory of its data set; repeatable.", metavar="NAME[=PATH]",
        read=read_tasks, default=default,
    )


GeneratedProblems = Annotated[int, Flag(
    "Number of problems of each task that needs no file.", min=1,
)]


@dataclass(frozen=True)
class ProblemOptions:
    """Which problems, of which tasks or of a prompt file, and how long their texts get."""

    task: Annotated[Sequence[tuple[str, str | None]], task_flag("word_problems")] = ()
    allow_code_execution: Annotated[bool, Flag(
        "Let tasks score answers by running generated code, in a sandbox.",
    )] = False
    problems: GeneratedProblems = 100
    problem_seed: ProblemSeed = 7
    prompt_file: Annotated[str | None, Flag(
        "Prompt file, of any format that `flyspec generate` reads. Without answers in it, the "
        "target's log-likelihood of the texts takes their place.",
    )] = None
    limit: PromptLimit = None
    chat: Chat = None
    max_tokens: Annotated[int | None, Flag(
        "Maximum output tokens.", min=1, default="as in the task's benchmark, mostly 256",
    )] = None


@dataclass(frozen=True)
class EvalOptions(ProblemOptions):
    """`flyspec eval`. Problem i is sampled with seed + i under every rule, for `seeds` seeds."""

    rules: Annotated[tuple[Condition, ...] | None, Flag(
        f"{RULES_HELP} `all`: every rule that needs no judge. Also shows the loss of each rule.",
        metavar="RULE,...", read=parse_conditions, default="exact, fly and fly with W = 0",
    )] = None
    grid: Annotated[Grid, Flag(
        "Repeat the rules with each of these values of a parameter (by name or symbol), of K or of "
        "drafter; several make a grid. Repeatable, or separated by spaces.",
        metavar="NAME=VALUE,...", read=parse_grid, default="none",
    )] = ()
    controls: Annotated[bool, Flag(
        "Also compare the controls: `random`, and each rule with a window without it.",
    )] = False
    rival: Annotated[str | None, Flag(
        "Also decode plainly with this model alone: a directory or hub id, or `draft` for the "
        "draft model.", metavar="MODEL", default="none",
    )] = None
    drafter: Drafter = ""
    num_speculative_tokens: KOrAuto = AUTO
    temperature: Annotated[float, _request("temperature")] = 0.0
    top_p: Annotated[float, _request("top_p")] = 1.0
    seed: Annotated[int, Flag(
        "Sampling seed of the first problem, one more for each later one.", min=0,
    )] = 0
    seeds: Annotated[int, Flag("Texts of each problem and rule, with a seed each.", min=1)] = 1
    log_likelihood: Annotated[bool, Flag(
        "Ask for the target's log-likelihood of texts with known answers, too.",
    )] = False
    concurrency: Annotated[int, Flag("Concurrent requests.", min=1)] = 8

    @property
    def conditions(self) -> tuple[Condition, ...]:
        return CONDITIONS if self.rules is None else self.rules


@dataclass(frozen=True)
class StudyOptions(ProblemOptions):
    """`flyspec study`. A study goes on where it was interrupted."""

    task: Annotated[Sequence[tuple[str, str | None]], task_flag(
        "the study's own, mostly word_problems",
    )] = ()
    problems: GeneratedProblems = 1000
    output: Annotated[Path, Flag(
        "Directory of the studies: each has its run and its report.html in a directory of its own.",
    )] = Path("studies")
    num_speculative_tokens: Annotated[int, Flag(
        "K, where a study does not vary it.", min=1,
    )] = 15
    temperature: Annotated[float | None, request_flag(
        "temperature", group=None, default=_OF_STUDY,
    )] = None
    seeds: Annotated[int | None, Flag(
        "Texts of each problem and rule; 1 if greedy.", min=1, default=_OF_STUDY,
    )] = None
    concurrency: Annotated[int, Flag("Concurrent requests.", min=1)] = 8
# fmt: on
