"""Grade-school word problems in any number, for measurements and as training data.

The bundled models are trained on them, and `flyspec bench` and `flyspec eval` ask for fresh ones
unless they are given prompts.
"""

from __future__ import annotations

from itertools import islice

from flyspec.prompts import Prompt
from flyspec_lab.word_problems.families import WordProblem as WordProblem
from flyspec_lab.word_problems.families import stream


def problems(seed: int | str, n: int, *, hard: bool = False) -> list[WordProblem]:
    """Return `n` problems; only training uses `train-...` seeds, so numbers give fresh ones."""
    return list(islice(stream(seed, hard=hard), n))


def word_problems(count: int, seed: int | str) -> list[Prompt]:
    """Return problems that the bundled models never saw, as prompts."""
    return [
        Prompt(p.question, "gsm8k", str(p.answer), f"problem {i} of seed {seed}")
        for i, p in enumerate(problems(seed, count))
    ]
