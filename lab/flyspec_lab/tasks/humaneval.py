"""HumanEval: function bodies for signatures with docstrings (Chen et al. 2021)."""

from __future__ import annotations

from flyspec_lab.tasks.code import CodeTask
from flyspec_lab.tasks.rows import question_files, read_rows
from flyspec_lab.tasks.task import Problem


class HumanEval(CodeTask):
    """HumanEval as its paper has it (arXiv 2107.03374, section 3; openai/human-eval).

    The prompt is continued as text until a stop sequence; prompt and completion, then the tests,
    are one program. A completion that an assistant ends with ``` is cut there, as
    lm-evaluation-harness does for `humaneval_instruct`.
    """

    name = "humaneval"
    summary = "Python functions to complete; generated code is run in a sandbox."
    reads = "JSON lines with `task_id`, `prompt`, `test` and `entry_point` (HumanEval.jsonl.gz)"
    max_tokens = 1024
    stop = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")

    def problems(self) -> list[Problem]:
        assert self.path is not None
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
