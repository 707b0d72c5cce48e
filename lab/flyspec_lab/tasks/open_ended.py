"""Prompts without a known answer: their texts are only described."""

from __future__ import annotations

from flyspec.prompts import read_prompts
from flyspec_lab.tasks.task import Problem, Score, Task


class OpenEnded(Task):
    """Prompts of any file that `flyspec generate --prompt-file` reads, questions as chats.

    Texts are described by `flyspec_lab.describe`: loops, broken endings, distinct n-grams.
    """

    name = "open_ended"
    summary = "Prompts of any file, without known answers."
    reads = "any prompt file: lines, JSON lines with `text` or `messages`, and the data sets'"
    scoring = "none: texts are described"
    max_tokens = 512

    def problems(self) -> list[Problem]:
        assert self.path is not None
        return [
            Problem(p.where.removeprefix(f"{self.path}: "), p.to_request(), None, p.category)
            for p in read_prompts(self.path, self.limit)
        ]

    def score(self, problem: Problem, text: str) -> Score | None:
        return None
