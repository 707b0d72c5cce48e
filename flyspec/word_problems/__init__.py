"""Grade-school word problems in any number, for measurements and as training data.

The bundled models are trained on them, and `flyspec bench` and `flyspec eval` ask for fresh ones
unless they are given prompts.
"""

from __future__ import annotations

from itertools import islice

from flyspec.word_problems.families import WordProblem as WordProblem
from flyspec.word_problems.families import stream


def problems(
    seed: int | str, n: int, *, hard: bool = False, zipf: bool = False
) -> list[WordProblem]:
    """Return `n` problems; only training uses `train-...` seeds, so numbers give fresh ones."""
    return list(islice(stream(seed, hard=hard, zipf=zipf), n))
