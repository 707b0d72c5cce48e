"""Code to continue: beginnings of standard library files, which the bundled models never saw."""

from __future__ import annotations

import io
import random
import tokenize
from collections.abc import Iterator
from typing import Self

from flyspec_lab.python_source import is_held_out, python_files, python_version
from flyspec_lab.tasks.task import Problem, Score, Task

_FIRST_LINE = 16
"""Lines of a file before the first place where it is cut."""
_APART = 8
"""Lines from one place to the next."""
_PROMPT_LINES = 40
_UNSAID = {tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER}
_LAYOUT = {tokenize.INDENT, tokenize.DEDENT}
_UNSAID_ALONE = {tokenize.STRING, *_LAYOUT}
"""Of these alone, a statement is a docstring or the like."""


class PythonCode(Task):
    """Up to 40 lines of a file of the running interpreter's standard library, to be continued.

    The files are those held out from the bundled models' training (`flyspec_lab.python_source`);
    other models have probably read them. They are cut every 8 lines, so neighbouring prompts share
    lines: some 500 prompts in an order drawn by the seed, and no more. Nothing says which
    continuation is right; two say the same if they are the same Python tokens, but for comments,
    line breaks inside statements and strings that are statements. To train on there are the files
    that are not held out.
    """

    name = "python_code"
    scoring = "none: texts are described"
    needs_path = False

    _held_out = True

    @classmethod
    def to_learn_from(cls, path: str | None, limit: int, seed: int) -> Self:
        task = cls(path, limit=limit, seed=seed)
        task._held_out = False
        return task

    def problems(self) -> list[Problem]:
        files = python_files(lambda path: is_held_out(path) == self._held_out)
        found = [problem for path, text in files.items() for problem in _cut(path, text)]
        random.Random(f"python_code {self.seed}").shuffle(found)
        return found[: self.num_generated]

    def score(self, problem: Problem, text: str) -> Score | None:
        return None

    def answer(self, problem: Problem, text: str) -> str:
        return " ".join(_said(text))

    def says_the_same(self, answer: str | None, other: str | None) -> bool:
        """True if one goes on where the other was cut off, or both are equal."""
        one, two = answer or "", other or ""
        return one.startswith(two) or two.startswith(one)


def _said(text: str) -> Iterator[str]:
    """Yield the tokens of each statement, up to the last whole one."""
    statement: list[tuple[int, str]] = []
    first = text.lstrip("\n")
    indentation = len(first) - len(first.lstrip(" "))
    # What the text is inside of, so that it may return there.
    above = "".join(f"{' ' * depth}if 1:\n" for depth in range(0, indentation, 4))
    try:
        for token in tokenize.generate_tokens(io.StringIO(above + text).readline):
            if token.type == tokenize.NEWLINE and token.string:
                said = any(kind not in _UNSAID_ALONE for kind, _ in statement)
                yield from (text for kind, text in statement if said or kind in _LAYOUT)
                statement = []
            elif token.type not in _UNSAID:
                statement.append((token.type, token.string))
    except (tokenize.TokenError, SyntaxError):  # it was cut off, or is no Python
        return


def _cut(path: str, text: str) -> Iterator[Problem]:
    lines = text.splitlines(keepends=True)
    for end in range(_FIRST_LINE, len(lines), _APART):
        yield Problem(
            f"{python_version()}, {path}, line {end}",
            "".join(lines[max(0, end - _PROMPT_LINES) : end]),
        )
