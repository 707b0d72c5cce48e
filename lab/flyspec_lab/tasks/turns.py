"""Spec-Bench and SPEED-Bench: conversations to measure speculative decoding by."""

from __future__ import annotations

from flyspec.values.chat import Chat
from flyspec_lab.tasks.numbers import reference_number, score_last_number
from flyspec_lab.tasks.rows import DataRow, question_files, read_rows
from flyspec_lab.tasks.task import Problem, Score, Task

_STRICT = {"coding", "extraction", "math", "math_reasoning", "qa", "rag", "reasoning"}
"""Categories with one right result, though only one of them comes with it."""
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"


class SpecBench(Task):
    """Spec-Bench's questions (Xia et al. 2024, arXiv 2401.07851; hemingkx/Spec-Bench).

    The first turn is asked as a user's message. The benchmark measures speed and has no scoring;
    but where a reference ends in `#### N`, as in the category math_reasoning, which is from GSM8K,
    the number after the last `####`, or else the last number, must be N.
    """

    name = "spec_bench"
    reads = "JSON lines with `question_id`, `category`, `turns` and perhaps `reference`"
    max_tokens = 1024

    def problems(self) -> list[Problem]:
        rows = read_rows(question_files(self.path))
        return [self._problem(row) for row in rows[: self.limit]]

    def score(self, problem: Problem, text: str) -> Score | None:
        return score_last_number(problem, text)

    def is_open(self, problem: Problem) -> bool:
        return problem.reference is None and problem.category not in _STRICT

    def _problem(self, row: DataRow) -> Problem:
        turns = row.texts("turns")
        references = row.get("reference")
        first = references[0] if isinstance(references, list) and references else ""
        number = reference_number(row, first) if "####" in str(first) else None
        key = str(row.get("question_id"))
        if key == "None":
            raise row.error("has no `question_id`")
        return Problem(key, Chat.of_user(turns[0]), number, row.get("category") or "")


class SpeedBench(SpecBench):
    """SPEED-Bench's questions (arXiv 2604.09557; nvidia/SPEED-Bench on the hub), first turns.

    Its files have placeholders for texts that are fetched elsewhere: what is read here are the
    files that its own preparation writes (specdec_bench's prepare_data.py in
    NVIDIA/Model-Optimizer), whose format is the same. There are no known answers.
    """

    name = "speed_bench"
    reads = "parquet or JSON lines with `question_id`, `category` and `turns`, after preparation"
    max_tokens = 4096

    def _problem(self, row: DataRow) -> Problem:
        if any(turn.startswith(_PLACEHOLDER) for turn in row.texts("turns")):
            raise row.error(
                "has a placeholder in `turns`; run the benchmark's prepare_data.py, which fetches "
                "the texts, and give the file that it writes"
            )
        problem = super()._problem(row)
        return Problem(problem.prompt_id, problem.prompt, None, problem.category)
