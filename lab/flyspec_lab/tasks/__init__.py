"""Tasks, which score a rule's texts. Each reads a public data set's own file format.

`task` has what all have in common; each other module has one family of data sets, and `TASKS`
lists them by the name that a user gives. `rows` reads files, `code` runs programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from flyspec_lab.tasks.acp_bench import AcpBench
from flyspec_lab.tasks.code import HumanEval, Mbpp
from flyspec_lab.tasks.multiple_choice import CommonsenseQa, Mmlu
from flyspec_lab.tasks.needle import Needle
from flyspec_lab.tasks.numbers import Gsm8k, Mgsm
from flyspec_lab.tasks.open_ended import OpenEnded
from flyspec_lab.tasks.python_code import PythonCode
from flyspec_lab.tasks.task import Problem as Problem
from flyspec_lab.tasks.task import Score as Score
from flyspec_lab.tasks.task import Task as Task
from flyspec_lab.tasks.turns import SpecBench, SpeedBench
from flyspec_lab.tasks.word_problems import WordProblems

_ALL: tuple[type[Task], ...] = (
    WordProblems, Gsm8k, Mgsm, HumanEval, Mbpp, AcpBench, CommonsenseQa, Mmlu, Needle,
    SpecBench, SpeedBench, OpenEnded, PythonCode,
)  # fmt: skip
TASKS: Mapping[str, type[Task]] = MappingProxyType({task.name: task for task in _ALL})
