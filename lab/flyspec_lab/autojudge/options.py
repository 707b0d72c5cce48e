"""Options of `flyspec autojudge train`. Imports neither torch nor scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from flyspec.flags import Dtype, Flag
from flyspec_lab.bench.options import ModelOptions, names_of
from flyspec_lab.tasks import TASKS


# fmt: off
@dataclass(frozen=True)
class JudgeTrainOptions(ModelOptions):
    """`flyspec autojudge train`. `max_tokens` None is the task's own limit."""

    draft_model: Annotated[str, Flag(
        "Draft model: a directory or hub id, with the target's tokenizer.",
        default="the bundled draft model",
    )] = ""
    draft_dtype: Annotated[Dtype, Flag("Data type of the draft model's weights.")] = "auto"
    task: Annotated[tuple[str, ...], Flag(
        "Tasks whose answers decide what is important, comma-separated: " f"{', '.join(TASKS)}.",
        metavar="NAME,...", listed=True, read=names_of(TASKS),
    )] = ("word_problems",)
    path: Annotated[str | None, Flag(
        "The file or directory of a task that is read from one.",
    )] = None
    problems: Annotated[int, Flag("Problems to mine, of all tasks together.", min=10)] = 2000
    seed: Annotated[int, Flag(
        "Seed of generated problems and of the split; measure with another one.", min=0,
    )] = 1
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
# fmt: on
