"""Code to continue: beginnings of standard library files, which the bundled models never saw."""

from __future__ import annotations

import random
from collections.abc import Iterator

from flyspec_lab.python_source import is_held_out, python_files, python_version
from flyspec_lab.tasks.task import Problem, Score, Task

_FIRST_LINE = 16
"""Lines of a file before the first place where it is cut."""
_APART = 8
"""Lines from one place to the next."""
_PROMPT_LINES = 40


class PythonCode(Task):
    """Up to 40 lines of a file of the running interpreter's standard library, to be continued.

    The files are those held out from the bundled models' training (`flyspec_lab.python_source`);
    other models have probably read them. They are cut every 8 lines, so neighbouring prompts share
    lines: some 500 prompts in an order drawn by the seed, and no more. Nothing says which
    continuation is right.
    """

    name = "python_code"
    needs_path = False

    def problems(self) -> list[Problem]:
        files = python_files(is_held_out)
        found = [problem for path, text in files.items() for problem in _cut(path, text)]
        random.Random(f"python_code {self.seed}").shuffle(found)
        return found[: self.num_generated]

    def score(self, problem: Problem, text: str) -> Score | None:
        return None


def _cut(path: str, text: str) -> Iterator[Problem]:
    lines = text.splitlines(keepends=True)
    for end in range(_FIRST_LINE, len(lines), _APART):
        yield Problem(
            f"{python_version()}, {path}, line {end}",
            "".join(lines[max(0, end - _PROMPT_LINES) : end]),
        )
