"""Notices a step of a model that does not end: the thread that runs it cannot tell."""

from __future__ import annotations

from typing import NamedTuple

from flyspec.config import STEP_TOKEN_S

TICK_S = 0.25
"""So often the step at hand is looked at."""


class Call(NamedTuple):
    """A call of the model: when it began, by `perf_counter_ns`, and the tokens in it."""

    began_ns: int
    num_tokens: int


class StepWatch:
    """Decides whether a call hangs. No clocks, no threads.

    Its time is counted in looks, none of them for more than two ticks: a process that is paused
    does not hang.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._call: Call | None = None
        self._running_s = 0.0

    def observe(self, elapsed_s: float, call: Call | None) -> str:
        """Why the model is lost, empty if it is not; `elapsed_s` since the last look."""
        if call is None or call is not self._call:
            self._call, self._running_s = call, 0.0
            return ""
        self._running_s += min(elapsed_s, 2 * TICK_S)
        if self._running_s <= self._timeout_s + STEP_TOKEN_S * call.num_tokens:
            return ""
        return f"a step of {call.num_tokens} tokens has not ended for {self._running_s:.1f} s"
