"""Several values of one key hidden in a long text (RULER's multi-value needle in a haystack)."""

from __future__ import annotations

import random
import re

from flyspec_lab.tasks.task import Problem, Score, Task
from flyspec_lab.word_problems import problems

_CONTEXT_WORDS, _NUM_VALUES, _NUM_DEPTHS = 1000, 4, 40
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
    words, since tasks know no tokenizer: 1,000 of about 1.3 tokens each.
    """

    name = "needle"
    needs_path = False
    max_tokens = 128

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
        values = [str(value) for value in rng.sample(range(10**6, 10**7), _NUM_VALUES)]
        sentences = _haystack(rng)
        depths = [100 * i / (_NUM_DEPTHS - 1) for i in range(_NUM_DEPTHS)]
        places = sorted(rng.sample(depths, _NUM_VALUES), reverse=True)
        for depth, value in zip(places, values, strict=True):
            at = int(len(sentences) * depth / 100)
            sentences.insert(at, f"One of the special magic numbers for {key} is: {value}.")
        return Problem(
            f"seed {self.seed}, {_CONTEXT_WORDS} words, {_NUM_VALUES} values, {index}",
            "Some special magic numbers are hidden within the following text. Make sure to "
            "memorize it. I will quiz you about the numbers afterwards.\n"
            f"{' '.join(sentences)}\n"
            f"What are all the special magic numbers for {key} mentioned in the provided text? "
            f"The special magic numbers for {key} mentioned in the provided text are",
            values,
        )


def _haystack(rng: random.Random) -> list[str]:
    """Return sentences of word problems, up to the length of the context."""
    sentences: list[str] = []
    words = 0
    while words < _CONTEXT_WORDS:
        for problem in problems(f"haystack {rng.random()}", 20):
            for sentence in re.split(r"(?<=[.?!])\s+", problem.question):
                if words < _CONTEXT_WORDS:
                    sentences.append(sentence)
                    words += len(sentence.split())
    return sentences
