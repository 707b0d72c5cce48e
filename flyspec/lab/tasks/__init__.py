"""Tasks: what a rule's texts are scored by. Each reads a public data set's own file format.

`task` has what all have in common; each other module has one family of data sets, and `TASKS`
lists them by the name that a user gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from flyspec.lab.tasks.task import Problem as Problem
from flyspec.lab.tasks.task import Score as Score
from flyspec.lab.tasks.task import Task as Task
from flyspec.lab.tasks.word_problems import WordProblems

TASKS: Mapping[str, type[Task]] = MappingProxyType({task.name: task for task in (WordProblems,)})
