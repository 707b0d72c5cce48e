"""What `flyspec study` can be told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from flyspec.bench.options import Problems, ProblemSeed
from flyspec.flags import Flag


# fmt: off
@dataclass(frozen=True)
class StudyOptions:
    """`flyspec study`. A study goes on where it was interrupted."""

    output: Annotated[Path, Flag(
        "Directory of the studies: each has its run and its report.html in a directory of its own.",
    )] = Path("studies")
    problems: Problems = 1000
    problem_seed: ProblemSeed = 7
    num_speculative_tokens: Annotated[int, Flag(
        "K, where a study does not vary it.", min=1,
    )] = 15
    concurrency: Annotated[int, Flag("Concurrent requests.", min=1)] = 8
    repeats: Annotated[int, Flag(
        "Runs of each batch size and rule, where a study measures speed by them.", min=1,
    )] = 6
    mixed_versions: Annotated[bool, Flag(
        "Go on with a study although another version of flyspec made the rest.",
    )] = False
# fmt: on
