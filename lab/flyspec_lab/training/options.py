"""Options of `flyspec autojudge train` and `flyspec heads train`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from flyspec.flags import Dtype, Flag
from flyspec.ranges import Range
from flyspec_lab.bench.options import ModelOptions
from flyspec_lab.options import ProblemOptions, TaskPaths, task_flag
from flyspec_lab.problems import read_problems
from flyspec_lab.tasks import Problem, Task


# fmt: off
@dataclass(frozen=True)
class TrainOptions(ModelOptions):
    """The tasks whose problems the target writes to."""

    task: Annotated[TaskPaths, task_flag("word_problems")] = ()
    problems: Annotated[int, Flag("Maximum problems, of all tasks together.", min=10)] = 2000
    seed: Annotated[int, Flag(
        "Seed of all that is drawn, problems included; measure with another one.", min=0,
    )] = 1
    # fmt: on

    @property
    def tasks(self) -> TaskPaths:
        """The tasks, with the files of those that are read from one."""
        return self.task or (("word_problems", None),)

    def read(self) -> list[tuple[Task, Problem]]:
        """Return the problems, of each task an equal share. Raises `ConfigError`."""
        share = -(-self.problems // len(self.tasks))
        o = ProblemOptions(task=self.tasks, problems=share, limit=share, problem_seed=self.seed)
        return [(each.task, problem) for each in read_problems(o) for problem in each.problems]


# fmt: off
@dataclass(frozen=True)
class JudgeTrainOptions(TrainOptions):
    """`flyspec autojudge train`. `max_tokens` None is the task's own limit."""

    draft_model: Annotated[str, Flag(
        "Draft model: a directory or hub id, with the target's tokenizer.",
        default="the bundled draft model",
    )] = ""
    draft_dtype: Annotated[Dtype, Flag("Data type of the draft model's weights.")] = "auto"
    max_tokens: Annotated[int | None, Flag(
        "Maximum output tokens.", min=1, default="the task's own",
    )] = None
    recall: Annotated[float, Flag(
        "Share of the important tokens, of held-out prompts, that the judge's own threshold must "
        "reject.",
    )] = 0.9
    concurrency: Annotated[int, Flag("Problems mined at once.", min=1)] = 32
    autojudge_file: Annotated[Path, Flag(
        "File to write, for the verify service's flag of this name.",
    )] = Path("autojudge.safetensors")


@dataclass(frozen=True)
class HeadTrainOptions(TrainOptions):
    """`flyspec heads train`."""

    problems: Annotated[int, Flag("Maximum problems, of all tasks together.", min=10)] = 8000
    max_tokens: Annotated[int, Flag(
        "Tokens with which the target continues a prompt.", min=1,
    )] = 160
    init_head: Annotated[Path | None, Flag(
        "Directory of an EAGLE-3 head to go on with; its sizes are kept.", default="a new head",
    )] = None
    draft_vocab_size: Annotated[int, Flag("Tokens that the head can draft.", min=16)] = 2048
    ttt_steps: Annotated[int, Flag(
        "Steps over which the head is unrolled (training-time test); a new head in the second half "
        "of training only.", Range(1, 16),
    )] = 5
    epochs: Annotated[int, Flag("Passes over the texts.", min=1)] = 1
    minutes: Annotated[float, Flag("Time limit of training, in minutes.", min=0)] = 60.0
    batch_tokens: Annotated[int, Flag("Tokens of a training step.", min=64)] = 4096
    muon_lr: Annotated[float, Flag("Learning rate of Muon, for the inner matrices.", min=0)] = 0.02
    adam_lr: Annotated[float, Flag("Learning rate of AdamW, for the rest.", min=0)] = 0.003
    head_directory: Annotated[Path, Flag(
        "Directory to write, for the verify service's --heads.",
    )] = Path("eagle3")
# fmt: on
