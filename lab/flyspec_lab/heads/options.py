"""Options of `flyspec heads`. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from flyspec.flags import Flag
from flyspec.ranges import Range
from flyspec_lab.bench.options import ModelOptions, numbers_flag

CORPORA = ("word_problems", "python")
"""Corpora that need no file: fresh word problems, and the standard library's source
(`flyspec_lab.python_source`), of which the bundled models' held-out files are left out."""

NO_CORPUS = "none"
Corpora = tuple[tuple[str, int | None], ...]
"""Names of corpora, with the number of prompts where it is given."""
ALL_CORPORA: Corpora = tuple((name, None) for name in CORPORA)


def _corpora(text: str) -> Corpora:
    """Parse NAME or NAME=COUNT, comma-separated, or none. Raises `ValueError`."""
    found = []
    for piece in text.split(",") if text.strip() != NO_CORPUS else ():
        name, _, count = piece.strip().partition("=")
        if name not in CORPORA:
            raise ValueError(f"{name!r}: must be one of {', '.join(CORPORA)}, or {NO_CORPUS} alone")
        if count and not (count.isdecimal() and int(count)):
            raise ValueError(f"{piece!r}: the number of prompts must be at least 1")
        found.append((name, int(count) if count else None))
    return tuple(found)


def _corpora_flag(doing: str) -> Flag:
    return Flag(
        f"Corpora to {doing} ({', '.join(CORPORA)}), each perhaps with its number of prompts; or "
        f"{NO_CORPUS}.",
        metavar="NAME[=N],...", listed=True, read=_corpora, default=",".join(CORPORA),
    )  # fmt: skip


# fmt: off
@dataclass(frozen=True)
class HeadTrainOptions(ModelOptions):
    """`flyspec heads train`. `corpora` None are all of them."""

    corpora: Annotated[Corpora | None, _corpora_flag("learn from")] = None
    data: Annotated[Sequence[str], Flag(
        "File of prompts whose answers to learn from, in any format of --prompt-file; repeatable.",
    )] = ()
    prompts: Annotated[int, Flag("Maximum prompts of each corpus and file.", min=10)] = 8000
    answers: Annotated[Literal["target", "corpus"], Flag(
        "Who goes on with the prompts: the target, or the corpora themselves, for a target that "
        "was trained on them.",
    )] = "target"
    max_tokens: Annotated[int, Flag(
        "Tokens with which the target continues a prompt.", min=1,
    )] = 160
    seed: Annotated[int, Flag(
        "Seed of generated problems, samples and weights; measure with another one.", min=0,
    )] = 1
    init_head: Annotated[Path | None, Flag(
        "Directory of an EAGLE-3 head to go on with; its sizes are kept.", default="a new head",
    )] = None
    draft_vocab_size: Annotated[int, Flag("Tokens that the head can draft.", min=16)] = 2048
    intermediate_size: Annotated[int | None, Flag(
        "Width of the head's MLP.", min=1, default="twice its hidden size",
    )] = None
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


@dataclass(frozen=True)
class HeadMeasureOptions(ModelOptions):
    """`flyspec heads measure`. Of `python`, it reads the files that training leaves out."""

    head: Annotated[str, Flag("Directory of a head.", default="the bundled one")] = ""
    draft_model: Annotated[str, Flag(
        "Draft model to compare with, of the target's tokenizer, or none.",
        default="the bundled one for the bundled target, else none",
    )] = ""
    corpora: Annotated[Corpora | None, _corpora_flag("measure on")] = None
    data: Annotated[Sequence[str], Flag(
        "File of prompts to measure on, in any format of --prompt-file; repeatable.",
    )] = ()
    prompts: Annotated[int, Flag("Maximum prompts of each corpus and file.", min=1)] = 100
    max_tokens: Annotated[int, Flag("Maximum output tokens.", min=2)] = 160
    seed: Annotated[int, Flag("Seed of the problems; another one than in training.", min=0)] = 7
    k: Annotated[tuple[int, ...], numbers_flag(
        "Drafted tokens per round (K)", name="--num-speculative-tokens",
    )] = (1, 2, 3, 4, 5, 6, 7, 8)
# fmt: on
