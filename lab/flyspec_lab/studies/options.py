"""What `flyspec study` can be told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from flyspec.flags import Flag
from flyspec.values.requests import request_flag
from flyspec_lab.options import GeneratedProblems, ProblemOptions, task_flag

_OF_STUDY = "the study's own"


# fmt: off
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
    repeats: Annotated[int, Flag(
        "Runs of each batch size and rule, where a study measures speed by them.", min=1,
    )] = 6
    mixed_versions: Annotated[bool, Flag(
        "Go on with a study although another version of flyspec made the rest.",
    )] = False
# fmt: on
