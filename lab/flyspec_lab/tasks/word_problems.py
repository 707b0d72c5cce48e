"""Our word problems: generated, in any number, never seen by the bundled models."""

from __future__ import annotations

import re

from flyspec.prompts import normal_number
from flyspec.values.chat import Chat
from flyspec_lab.tasks.task import Problem, Score, Task
from flyspec_lab.word_problems import problems

_LAST_LINE = re.compile(r"(?:\A|\n)#### (-?\d[\d,]*(?:\.\d+)?)\s*\Z")


class WordProblems(Task):
    """Scored strictly: the last line must be `#### N` and nothing else, as in training."""

    name = "word_problems"
    needs_path = False

    def problems(self) -> list[Problem]:
        return [
            Problem(f"seed {self.seed}, problem {i}", Chat.of_user(p.question), str(p.answer))
            for i, p in enumerate(problems(self.seed, self.num_generated))
        ]

    def score(self, problem: Problem, text: str) -> Score:
        match = _LAST_LINE.search(text)
        answer = normal_number(match[1]) if match else None
        return Score(float(answer == problem.reference), answer)
