"""Several values of one key hidden in a long text (RULER's multi-value needle in a haystack)."""

from __future__ import annotations

import random
import re
from typing import Any

from flyspec.errors import ConfigError
from flyspec_lab.tasks.task import Problem, Score, Task
from flyspec_lab.word_problems import problems

_NUM_DEPTHS = 40
_QUALITIES = (
    "brave", "calm", "dusty", "eager", "faint", "gentle", "hollow", "icy", "jolly", "keen",
    "lively", "mellow",
)  # fmt: skip
_THINGS = (
    "anchor", "basket", "candle", "dolphin", "engine", "falcon", "garden", "hammer", "island",
    "jacket", "kettle",
)  # fmt: skip


class Needle(Task):
    """RULER's `niah_multivalue` (Hsieh et al. 2024, arXiv 2404.06654; NVIDIA/RULER).

    Template, needles, their depths (of 40 evenly spread ones) and the score, which is the share
    of values found anywhere in the answer, are RULER's. The haystack is of generated word
    problems, fresh ones for each problem, where RULER has essays, and its length is counted in
    words, since tasks know no tokenizer: `context_words` of about 1.3 tokens each.
    """

    name = "needle"
    summary = "Four numbers to find again in a long text; generated."
    scoring = "the share of values found"
    needs_path = False
    max_tokens = 128

    def __init__(
        self,
        path: str | None = None,
        *,
        context_words: int = 1000,
        num_values: int = 4,
        **options: Any,
    ) -> None:
        super().__init__(path, **options)
        if not 1 <= num_values <= _NUM_DEPTHS:
            raise ConfigError(f"num_values is {num_values}; give 1 to {_NUM_DEPTHS}")
        if context_words < 1:
            raise ConfigError(f"context_words is {context_words}; give at least 1")
        self.context_words, self.num_values = context_words, num_values

    def problems(self) -> list[Problem]:
        return [self._problem(i) for i in range(self.num_generated)]

    def score(self, problem: Problem, text: str) -> Score:
        values = problem.reference
        found = [value for value in values if value in text]
        missing = len(values) - len(found)
        detail = f"{missing} of {len(values)} values missing" if missing else ""
        return Score(len(found) / len(values), ", ".join(found) or None, detail)

    def _problem(self, index: int) -> Problem:
        rng = random.Random(f"needle {self.seed} {index}")
        key = f"{rng.choice(_QUALITIES)}-{rng.choice(_THINGS)}"
        values = [str(value) for value in rng.sample(range(10**6, 10**7), self.num_values)]
        sentences = _haystack(rng, self.context_words)
        depths = [100 * i / (_NUM_DEPTHS - 1) for i in range(_NUM_DEPTHS)]
        places = sorted(rng.sample(depths, self.num_values), reverse=True)
        for depth, value in zip(places, values, strict=True):
            at = int(len(sentences) * depth / 100)
            sentences.insert(at, f"One of the special magic numbers for {key} is: {value}.")
        return Problem(
            f"seed {self.seed}, {self.context_words} words, {self.num_values} values, {index}",
            "Some special magic numbers are hidden within the following text. Make sure to "
            "memorize it. I will quiz you about the numbers afterwards.\n"
            f"{' '.join(sentences)}\n"
            f"What are all the special magic numbers for {key} mentioned in the provided text? "
            f"The special magic numbers for {key} mentioned in the provided text are",
            values,
        )


def _haystack(rng: random.Random, num_words: int) -> list[str]:
    """Return the sentences of word problems, until there are as many words."""
    sentences: list[str] = []
    words = 0
    while words < num_words:
        for problem in problems(f"haystack {rng.random()}", 20):
            for sentence in re.split(r"(?<=[.?!])\s+", problem.question):
                if words < num_words:
                    sentences.append(sentence)
                    words += len(sentence.split())
    return sentences
