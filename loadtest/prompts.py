"""Prompts, from files and freshly generated."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import cycle

from flyspec.client import Chat, Prompt
from flyspec.prompts import read_prompts
from flyspec_lab.word_problems import word_problems

FRESH, VARIED = "problems", "varied"
"""Instead of a file's name: word problems as in the bundled models' training data; those, code to
continue and long chats."""
PROBLEMS = 2000
_CODE = (
    'import os\n\ndef read_lines(path):\n    """Return the lines of a text file."""\n',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n",
)


def prompts_in_turn(sources: Sequence[str], seed: int) -> Callable[[], Prompt]:
    """Return a function that gives the next prompt of all these files, in an order of the seed.

    Questions are sent as chats, code is continued. Raises `ConfigError` for a file that cannot be
    read.
    """
    rng = random.Random(seed)
    prompts = [prompt for source in sources for prompt in _prompts(source, seed, rng)]
    rng.shuffle(prompts)
    turn = cycle(prompts)
    return lambda: next(turn)


def varied_prompt(rng: random.Random, asked: Sequence[str]) -> Prompt:
    """Draw one of these questions, code to continue, or a long chat."""
    kind = rng.random()
    if kind < 0.55:
        return Chat.of_user(rng.choice(asked))
    if kind < 0.85:
        return rng.choice(_CODE) * rng.choice((1, 1, 3)) + f"    # {rng.random()}\n"
    return Chat.of_user(" ".join(rng.choices(asked, k=8)))


def _prompts(source: str, seed: int, rng: random.Random) -> list[Prompt]:
    if source not in (FRESH, VARIED):
        return [prompt.to_request() for prompt in read_prompts(source)]
    asked = word_problems(PROBLEMS, f"loadtest-{seed}")
    if source == FRESH:
        return [prompt.to_request() for prompt in asked]
    texts = [prompt.text for prompt in asked]
    return [varied_prompt(rng, texts) for _ in asked]
