"""The problems of a task that every condition has answered, so that conditions can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flyspec_lab.arms import Arm
from flyspec_lab.run import Wanted
from flyspec_lab.samples import latest
from flyspec_lab.statistics import Array, PairedBootstrap

ROUNDS, TIME = "num_rounds", "total_ns"
"""Basis of comparing tokens: speed is tokens per round, or per nanosecond of a request."""

Row = dict[str, Any]


class Answered:
    """The samples of a task's problems that every arm has answered, by the arm's name.

    The rows of all arms are in the same order. Arms without any sample are left out, and named in
    `missing`.
    """

    def __init__(self, task: str, arms: Sequence[Arm], wanted: Wanted, rows: Sequence[Row]) -> None:
        self.task = task
        self.failed = {arm.name: 0 for arm in arms}
        good: dict[str, dict[tuple[str, int], Row]] = {arm.name: {} for arm in arms}
        there = latest(rows)
        for key, unit in wanted.items():
            row = there.get(key)
            if row is None or unit.task.name != task:
                continue
            if row["error"] is None:
                good[unit.arm.name][unit.problem.prompt_id, unit.repeat] = row
            else:
                self.failed[unit.arm.name] += 1
        self.arms = [arm for arm in arms if good[arm.name]]
        self.missing = [arm.name for arm in arms if not good[arm.name]]
        self.places = [
            place
            for place in (good[self.arms[0].name] if self.arms else ())
            if all(place in good[arm.name] for arm in self.arms)
        ]
        """The problem and the repeat of each text."""
        self.rows = {arm.name: [good[arm.name][p] for p in self.places] for arm in self.arms}
        ids = list(dict.fromkeys(prompt_id for prompt_id, _ in self.places))
        numbers = {prompt_id: number for number, prompt_id in enumerate(ids)}
        self._problem = np.array([numbers[prompt_id] for prompt_id, _ in self.places], int)
        self.first = np.unique(self._problem, return_index=True)[1]
        """Index of each problem's first text. Tests that take texts to be independent use these."""
        self.num_problems = len(ids)
        self.bootstrap = PairedBootstrap(self.num_problems) if self.places else None

    def column(self, arm: str, name: str) -> Array:
        """Return a column of an arm's samples; null is NaN."""
        values = [row[name] for row in self.rows[arm]]
        return np.array([np.nan if v is None else float(v) for v in values])

    def per_problem(self, *columns: Array) -> Array:
        """Return sums over the repeats of each problem, [problems, columns]."""
        return np.stack(
            [np.bincount(self._problem, c, minlength=self.num_problems) for c in columns], axis=1
        )

    def curve(self, arms: Sequence[Arm], spent: str) -> Array:
        """Return arms as a curve over their tokens per round (`ROUNDS`) or per nanosecond (`TIME`).

        That is [problems, 3 x arms]: tokens of all arms, what these spent, and scores, the mean of
        a problem's texts.
        """
        gained, used, score = (
            self.per_problem(*(self.column(arm.name, name) for arm in arms))
            for name in ("num_tokens", spent, "score")
        )
        score *= self.num_problems / max(1, len(self.places))
        return np.concatenate([gained, used, score], axis=1)

    @property
    def has_answers(self) -> bool:
        """True if there are texts, and every one has a score."""
        return bool(self.places) and all(
            row["score"] is not None for rows in self.rows.values() for row in rows
        )
