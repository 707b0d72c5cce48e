"""Tasks: what a rule's texts are scored by. Each reads a public data set's own file format.

`task` has what all have in common; each other module has one family of data sets, and `TASKS`
lists them by the name that a user gives. `rows` reads files, `code` runs programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from flyspec_lab.tasks.acp_bench import AcpBench
from flyspec_lab.tasks.code import pass_at_k as pass_at_k
from flyspec_lab.tasks.gsm8k import Gsm8k
from flyspec_lab.tasks.humaneval import HumanEval
from flyspec_lab.tasks.mbpp import Mbpp
from flyspec_lab.tasks.mgsm import Mgsm
from flyspec_lab.tasks.multiple_choice import CommonsenseQa, Mmlu
from flyspec_lab.tasks.needle import Needle
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
