"""Detects a model step that does not end, which the thread that runs it cannot do."""

from __future__ import annotations

from typing import NamedTuple

from flyspec.config import STEP_TOKEN_S

TICK_S = 0.25
"""Seconds between checks of the current step."""


class Call(NamedTuple):
    """A call of the model: its start by `perf_counter_ns`, and the number of tokens in it."""

    began_ns: int
    num_tokens: int


class StepWatch:
    """Decides whether a call hangs. No clocks, no threads.

    Each check counts for at most two ticks, so that a paused process does not count as hung.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._call: Call | None = None
        self._running_s = 0.0

    def observe(self, elapsed_s: float, call: Call | None) -> str:
        """Return why the model is lost, or ""; `elapsed_s` is the time since the last check."""
        if call is None or call is not self._call:
            self._call, self._running_s = call, 0.0
            return ""
        self._running_s += min(elapsed_s, 2 * TICK_S)
        if self._running_s <= self._timeout_s + STEP_TOKEN_S * call.num_tokens:
            return ""
        return f"a step of {call.num_tokens} tokens has been running for {self._running_s:.1f} s"
