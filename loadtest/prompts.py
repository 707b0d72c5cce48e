"""Prompts, from files or freshly generated."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import cycle

from flyspec.client import Prompt
from flyspec.prompts import read_prompts
from flyspec_lab.word_problems import word_problems

PROBLEMS = 2000


def prompts_in_turn(files: Sequence[str], seed: int) -> Callable[[], Prompt]:
    """Return a function that gives the next prompt of all these files, in an order of the seed.

    Without files, they are word problems as in the bundled models' training data. Questions are
    sent as chats, code is continued. Raises `ConfigError` for a file that cannot be read.
    """
    found = [prompt for file in files for prompt in read_prompts(file)]
    prompts = found if files else word_problems(PROBLEMS, f"loadtest-{seed}")
    random.Random(seed).shuffle(prompts)
    turn = cycle(prompts)
    return lambda: next(turn).to_request()
