"""Mixes of prompts, from files and freshly generated."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from flyspec.client import Chat, Prompt
from flyspec.prompts import read_prompts
from flyspec_lab.word_problems import word_problems

FRESH, VARIED = "problems", "varied"
"""Instead of a file's name: word problems as in the bundled models' training data; those, code to
continue and long chats."""
_CODE = (
    'import os\n\ndef read_lines(path):\n    """Return the lines of a text file."""\n',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n",
)


@dataclass(frozen=True, slots=True)
class Source:
    """A file of prompts, or `FRESH` or `VARIED`, and its weight among the others."""

    name: str
    weight: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Source:
        """Parse FILE or FILE:WEIGHT. A file with a colon in its name may need both."""
        name, colon, weight = text.rpartition(":")
        if not colon or Path(text).exists():
            return cls(text)
        try:
            number = float(weight)
        except ValueError:
            return cls(text)
        if not number > 0:
            raise ValueError(f"{text}: the weight must be greater than 0")
        return cls(name, number)

    def __str__(self) -> str:
        name = Path(self.name).name
        return name if self.weight == 1.0 else f"{name}:{self.weight:g}"


def prompt_mix(
    sources: Sequence[Source], problems: int, chat: bool | None, seed: int
) -> Callable[[], Prompt]:
    """Return a function that gives the next prompt: a source by weight, its prompts in turn.

    Each source begins at a random place. Questions are sent as chats, code is continued; `chat`
    overrides that. Raises `ConfigError` for a file that cannot be read.
    """
    rng = random.Random(seed)
    turns = []
    for source in sources:
        prompts = _prompts(source.name, problems, seed, chat)
        first = rng.randrange(len(prompts))
        turns.append(cycle(prompts[first:] + prompts[:first]))
    weights = [s.weight for s in sources]

    def following() -> Prompt:
        (turn,) = rng.choices(turns, weights)
        return next(turn)

    return following


def varied_prompt(rng: random.Random, asked: Sequence[str]) -> Prompt:
    """Draw one of these questions, code to continue, or a long chat."""
    kind = rng.random()
    if kind < 0.55:
        return Chat.of_user(rng.choice(asked))
    if kind < 0.85:
        return rng.choice(_CODE) * rng.choice((1, 1, 3)) + f"    # {rng.random()}\n"
    return Chat.of_user(" ".join(rng.choices(asked, k=8)))


def _prompts(name: str, count: int, seed: int, chat: bool | None) -> list[Prompt]:
    if name not in (FRESH, VARIED):
        return [prompt.to_request(chat) for prompt in read_prompts(name)]
    asked = word_problems(count, f"loadtest-{seed}")
    if name == FRESH:
        return [prompt.to_request(chat) for prompt in asked]
    rng = random.Random(seed)
    return [varied_prompt(rng, [p.text for p in asked]) for _ in asked]
