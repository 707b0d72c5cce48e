"""Tasks: what a rule's texts are scored by. Each reads a public data set's own file format.

`task` has what all have in common; each other module has one family of data sets, and `TASKS`
lists them by the name that a user gives. `rows` reads files, `code` runs programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from flyspec.lab.tasks.acp_bench import AcpBench
from flyspec.lab.tasks.code import pass_at_k as pass_at_k
from flyspec.lab.tasks.gsm8k import Gsm8k
from flyspec.lab.tasks.humaneval import HumanEval
from flyspec.lab.tasks.mbpp import Mbpp
from flyspec.lab.tasks.mgsm import Mgsm
from flyspec.lab.tasks.multiple_choice import CommonsenseQa, Mmlu
from flyspec.lab.tasks.needle import Needle
from flyspec.lab.tasks.open_ended import OpenEnded
from flyspec.lab.tasks.python_code import PythonCode
from flyspec.lab.tasks.task import Problem as Problem
from flyspec.lab.tasks.task import Score as Score
from flyspec.lab.tasks.task import Task as Task
from flyspec.lab.tasks.turns import SpecBench, SpeedBench
from flyspec.lab.tasks.word_problems import WordProblems

_ALL: tuple[type[Task], ...] = (
    WordProblems, Gsm8k, Mgsm, HumanEval, Mbpp, AcpBench, CommonsenseQa, Mmlu, Needle,
    SpecBench, SpeedBench, OpenEnded, PythonCode,
)  # fmt: skip
TASKS: Mapping[str, type[Task]] = MappingProxyType({task.name: task for task in _ALL})
