"""A task: problems read from a data set's files or generated, and how answers are scored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from flyspec.errors import ConfigError
from flyspec.values.requests import Prompt


@dataclass(frozen=True)
class Problem:
    """A prompt of a task.

    `prompt_id` is stable and unique within the task and its files: it keys recorded samples.
    `reference` is what scoring needs, of JSON's types. `category` is the data set's own, if any.
    """

    prompt_id: str
    prompt: Prompt
    reference: Any = None
    category: str = ""


@dataclass(frozen=True)
class Score:
    """Quality of a text, from 0 to 1; a task with right and wrong answers gives only those two.

    `answer` is what was extracted from the text, None if nothing was found; `detail` says in a few
    words why an answer is wrong, if there is more to say.
    """

    value: float
    answer: str | None = None
    detail: str = ""


class Task(ABC):
    """A data set with templates, few-shot examples and scoring as its benchmark does it.

    `path`: the data set's file or directory, None where problems are generated (`needs_path` says
    which), `limit` the largest number of problems, which says how many are generated.
    `allow_code_execution`: whether tasks that score by running generated code (`runs_code`) may.
    `max_tokens` and `stop` are the benchmark's own limits, `num_shots` its examples before each
    question. Raises `ConfigError` for arguments that
    the task cannot work with, and, with file and line, if the file is not in the data set's format.
    """

    name: ClassVar[str]
    reads: ClassVar[str] = ""
    """The data set's files, for the error if there is no path."""
    needs_path: ClassVar[bool] = True
    runs_code: ClassVar[bool] = False
    num_shots: ClassVar[int] = 0
    max_tokens: ClassVar[int] = 256
    stop: Sequence[str] = ()

    def __init__(
        self,
        path: str | None = None,
        *,
        limit: int | None = None,
        seed: int = 7,
        allow_code_execution: bool = False,
    ) -> None:
        if self.needs_path and path is None:
            raise ConfigError(f"--task {self.name}: needs the path of its data set: {self.reads}")
        if not self.needs_path and path is not None:
            raise ConfigError(f"--task {self.name}: generates its problems; leave the path out")
        if self.runs_code and not allow_code_execution:
            raise ConfigError(
                f"--task {self.name}: scores answers by running generated code, in a sandbox; "
                "allow that (--allow-code-execution) or choose another task"
            )
        self.path, self.limit, self.seed = path or "", limit, seed

    @property
    def num_generated(self) -> int:
        """Number of problems of a task that generates them; 100 without a `limit`."""
        return 100 if self.limit is None else self.limit

    @abstractmethod
    def problems(self) -> list[Problem]:
        """Return the problems, `limit` of them at most, the same for the same arguments."""

    @abstractmethod
    def score(self, problem: Problem, text: str) -> Score | None:
        """Score a text. None if there is no known answer, and texts are only described.

        May take seconds (generated code is run) and is called in a thread of its own.
        """

    def is_open(self, problem: Problem) -> bool:
        """True if answers may be worded in many ways; here, where none is known."""
        return problem.reference is None

    def until_stop(self, text: str) -> str:
        """Return the text up to the first stop sequence, if it has any."""
        ends = [at for at in map(text.find, self.stop) if at >= 0]
        return text[: min(ends, default=len(text))]
