"""GSM8K: grade-school word problems (Cobbe et al. 2021, arXiv 2110.14168)."""

from __future__ import annotations

import re
from typing import Any

from flyspec.prompts import normal_number
from flyspec_lab.tasks.answers import last_number
from flyspec_lab.tasks.rows import (
    DataRow,
    choose_examples,
    example_files,
    question_files,
    read_rows,
)
from flyspec_lab.tasks.task import Problem, Score, Task

_MARKED = re.compile(r"#### (-?[0-9.,]+)")


class Gsm8k(Task):
    """GSM8K as lm-evaluation-harness has it (lm_eval/tasks/gsm8k/gsm8k.yaml, version 3).

    Five examples from the train split beside the file, or else from its other rows. The answer is
    the number after `####`, as the examples show it (the harness's strict match), or with
    `strict=False` the number after the last `####`, or else the last number (its flexible match).
    Numbers are compared as numbers, so that 18.00 is 18.
    """

    name = "gsm8k"
    summary = "Grade-school word problems, with worked examples."
    reads = "JSON lines or parquet with `question` and `answer`, whose last line is `#### N`"
    scoring = "the number after `####`"
    default_shots = 5
    stop = ("Question:", "</s>", "<|im_end|>")

    def __init__(self, path: str | None = None, *, strict: bool = True, **options: Any) -> None:
        super().__init__(path, **options)
        self.strict = strict

    def problems(self) -> list[Problem]:
        assert self.path is not None
        files = question_files(self.path)
        rows = read_rows(files)
        examples = example_files(files) if self.num_shots else []
        pool = read_rows(examples) if examples else rows
        return [self._problem(row, pool) for row in rows[: self.limit]]

    def score(self, problem: Problem, text: str) -> Score:
        text = self.until_stop(text)
        marked = _MARKED.search(text)
        strict = normal_number(marked[1]) if marked else None
        flexible = last_number(text)
        answer = strict if self.strict else flexible
        right = answer == problem.reference
        hint = "right, but not after ####" if not right and flexible == problem.reference else ""
        return Score(float(right), answer, hint)

    def _problem(self, row: DataRow, pool: list[DataRow]) -> Problem:
        shots = choose_examples(pool, self.num_shots, self.seed, row.key, but=row)
        shown = [f"{_asked(shot)} {shot.text('answer')}\n\n" for shot in shots]
        return Problem(
            row.key, "".join(shown) + _asked(row), reference_number(row, row.text("answer"))
        )


def reference_number(row: DataRow, answer: str) -> str:
    """Return the number after `####`. Raises `ConfigError` if there is none."""
    if "####" not in answer:
        raise row.error("the answer has no `####`")
    return normal_number(answer.rsplit("####", 1)[1])


def _asked(row: DataRow) -> str:
    return f"Question: {row.text('question')}\nAnswer:"
