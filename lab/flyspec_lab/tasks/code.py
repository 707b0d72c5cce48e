"""Tasks whose answers are programs, scored by running tests: HumanEval and MBPP."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from flyspec.errors import ConfigError
from flyspec_lab.sandbox import check_sandbox, run_tests
from flyspec_lab.tasks.rows import DataRow, question_files, read_rows, read_with_examples
from flyspec_lab.tasks.task import Problem, Score, Task

_EXAMPLES, _TEST = range(2, 11), range(11, 511)  # the paper's split; it shows 2, 3 and 4
_FENCED = re.compile(r"```(?:\w+)?\n(.*?)(?:\n```|\Z)", re.DOTALL)


class CodeTask(Task):
    """A task whose answers are run in the sandbox: refused unless allowed and possible here."""

    runs_code = True

    def __init__(self, path: str | None = None, **options: Any) -> None:
        super().__init__(path, **options)
        check_sandbox()

    @abstractmethod
    def program(self, problem: Problem, text: str) -> str:
        """Return the program that the text stands for."""

    @abstractmethod
    def tests(self, problem: Problem) -> str:
        """Return what raises an exception unless the program is right."""

    def score(self, problem: Problem, text: str) -> Score:
        program = self.program(problem, text)
        done = run_tests(program, self.tests(problem))
        return Score(float(done.passed), program, done.detail)


class HumanEval(CodeTask):
    """HumanEval as its paper has it (arXiv 2107.03374, section 3; openai/human-eval).

    The prompt is continued as text until a stop sequence; prompt and completion, then the tests,
    are one program. A completion that an assistant ends with ``` is cut there, as
    lm-evaluation-harness does for `humaneval_instruct`.
    """

    name = "humaneval"
    reads = "JSON lines with `task_id`, `prompt`, `test` and `entry_point` (HumanEval.jsonl.gz)"
    max_tokens = 1024
    stop = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")

    def problems(self) -> list[Problem]:
        return [
            Problem(
                row.text("task_id"),
                row.text("prompt"),
                {name: row.text(name) for name in ("prompt", "test", "entry_point")},
            )
            for row in read_rows(question_files(self.path))[: self.limit]
        ]

    def program(self, problem: Problem, text: str) -> str:
        completion = self.until_stop(text).split("```", 1)[0]
        return f"{problem.reference['prompt']}{completion}\n"

    def tests(self, problem: Problem) -> str:
        return f"{problem.reference['test']}\ncheck({problem.reference['entry_point']})\n"


class Mbpp(CodeTask):
    """MBPP as its paper has it (arXiv 2108.07732; google-research/mbpp), original or sanitized.

    Tasks 11 to 510 are the test split, and tasks 2, 3 and 4 the three examples, as in the paper
    and in lm-evaluation-harness; both are in the original file, while the hub has the examples in
    a file for `prompt` beside that for `test`. All tests must pass, not only those that the prompt
    shows. An answer in a code block is taken from it, as the harness does for `mbpp_instruct`.
    """

    name = "mbpp"
    reads = (
        "mbpp.jsonl (`text`, `code`, `test_list`, `test_setup_code`) or sanitized-mbpp.json "
        "(`prompt`, `code`, `test_list`, `test_imports`), or the hub's parquet files"
    )
    num_shots = 3
    max_tokens = 256
    stop = ("[DONE]",)

    def problems(self) -> list[Problem]:
        rows, pool = read_with_examples(self.path, ("prompt",))
        shown = "".join(self._examples(pool))
        tests = [row for row in rows if _id(row) in _TEST]
        if not tests:
            raise ConfigError(
                f"{self.path}: has no task of the test split, "
                f"whose ids are {_TEST[0]} to {_TEST[-1]}"
            )
        return [
            Problem(f"MBPP/{_id(row)}", shown + _asked(row), {"tests": _tests(row)})
            for row in tests[: self.limit]
        ]

    def program(self, problem: Problem, text: str) -> str:
        code = self.until_stop(text)
        fenced = _FENCED.search(code)
        return f"{fenced[1] if fenced else code}\n"

    def tests(self, problem: Problem) -> str:
        return str(problem.reference["tests"])

    def _examples(self, pool: Sequence[DataRow]) -> list[str]:
        known = {_id(row): row for row in pool}
        ids = [i for i in sorted(known) if i in _EXAMPLES][: self.num_shots]
        if len(ids) < self.num_shots:
            raise ConfigError(
                f"{self.path}: {self.num_shots} examples are asked for, and it has {len(ids)} of "
                "the tasks 2 to 10 that examples are taken from; give the whole data set, or the "
                "file of its `prompt` split beside it"
            )
        return [f"{_asked(known[i])}{known[i].text('code')}\n[DONE]\n\n" for i in ids]


def _id(row: DataRow) -> int:
    number = row.get("task_id")
    if not isinstance(number, int):
        raise row.error("`task_id` is not a number")
    return number


def _asked(row: DataRow) -> str:
    tests = "\n".join(row.texts("test_list")[:3])
    return (
        f"You are an expert Python programmer, and here is your task: {row.text('text', 'prompt')} "
        f"Your code should pass these tests:\n\n{tests}\n[BEGIN]\n"
    )


def _tests(row: DataRow) -> str:
    imports = row.get("test_imports") or []
    return "\n".join([*imports, row.get("test_setup_code") or "", *row.texts("test_list"), ""])
