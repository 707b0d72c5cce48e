"""Decides whether a model is lost: after failed steps, or in one that does not end. No torch."""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import NamedTuple

from flyspec.config import STEP_TOKEN_S
from flyspec.engine.out_of_memory import is_out_of_memory
from flyspec.errors import ModelFailureError

MOST_IN_ROW = 3
"""Consecutive failed steps after which a model is considered lost."""
FOR_GOOD = ("cuda error", "hip error", "device-side assert", "cublas", "cudnn", "nccl")
"""Lowercase fragments of the errors of a device whose context is no longer usable."""
TICK_S = 0.25
"""Seconds between checks of the current step."""


def is_for_good(error: BaseException) -> bool:
    """True if no later step can work in this process, as a failed device repeats its error.

    Judged by the message, as torch raises RuntimeError for most of them. Running out of memory is
    temporary.
    """
    text = f"{type(error).__name__} {error}".lower()
    return not is_out_of_memory(error) and (
        "acceleratorerror" in text or any(words in text for words in FOR_GOOD)
    )


class Failures:
    """The failures of one model's steps. `lost` gets the reason to restart the process."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._in_row = 0
        self.num_total = 0
        self.lost: Future[str] = Future()

    def failed(self, error: Exception) -> ModelFailureError:
        """Record a failed step, and return the error for the work that waits for it."""
        self.num_total += 1
        self._in_row += 1
        what = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
        if is_for_good(error):
            self.lose(f"its device failed: {what}")
        elif self._in_row >= MOST_IN_ROW:
            self.lose(f"{self._in_row} steps in a row failed, the last with {what}")
        return ModelFailureError(f"the model of the {self._service} service failed: {what}")

    def worked(self) -> None:
        self._in_row = 0

    def lose(self, reason: str) -> None:
        """Give up on the model; the first reason counts. Thread-safe."""
        with suppress(InvalidStateError):
            self.lost.set_result(reason)


class Call(NamedTuple):
    """A call of the model: its start by `perf_counter_ns`, and the number of tokens in it."""

    began_ns: int
    num_tokens: int


class StepWatch:
    """Decides whether a call hangs, which the thread that makes it cannot. No clocks, no threads.

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
