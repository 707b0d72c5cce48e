"""Prompts of a file: described where no answer is known, and else scored by the last number."""

from __future__ import annotations

from typing import Any

from flyspec.errors import ConfigError
from flyspec.prompts import read_prompts
from flyspec_lab.tasks.numbers import score_last_number
from flyspec_lab.tasks.task import Problem, Score, Task


class OpenEnded(Task):
    """Prompts of any file that `flyspec generate --prompt-file` reads, questions as chats.

    `chat` sends all of them as chats, or none. Where the file has answers, they are numbers.
    """

    name = "open_ended"
    reads = "any prompt file: lines, JSON lines with `text` or `messages`, and the data sets'"

    def __init__(self, path: str | None = None, *, chat: bool | None = None, **known: Any) -> None:
        super().__init__(path, **known)
        self.chat = chat

    def problems(self) -> list[Problem]:
        prompts = read_prompts(self.path, self.limit)
        known = [prompt.reference is not None for prompt in prompts]
        if any(known) and not all(known):
            where = prompts[known.index(False)].where
            raise ConfigError(f"{where}: has no answer, but other prompts have one")
        return [
            Problem(p.where.rpartition(": ")[2], p.to_request(self.chat), p.reference, p.category)
            for p in prompts
        ]

    def score(self, problem: Problem, text: str) -> Score | None:
        return score_last_number(problem, text)
