"""What tasks have in common whose answers are programs, scored by running tests."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

from flyspec_lab.sandbox import check_sandbox, run_tests
from flyspec_lab.tasks.task import Problem, Score, Task


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return an unbiased estimate of the chance that one of k samples of a problem is correct.

    1 − C(n − c, k) / C(n, k) for c correct ones of n (Chen et al. 2021, arXiv 2107.03374,
    equation 1). Raises `ValueError` unless 1 ≤ k ≤ n and 0 ≤ c ≤ n.
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(f"no pass@{k} of {num_correct} correct samples of {num_samples}")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


class CodeTask(Task):
    """A task whose answers are run in the sandbox: refused unless allowed and possible here."""

    runs_code = True
    scoring = "all tests pass, in a sandbox (pass@1)"

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
