"""Decides after a failed step whether the model can still be used. Imports no torch."""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from flyspec.engine.out_of_memory import is_out_of_memory
from flyspec.errors import ModelFailureError

MOST_IN_ROW = 3
"""Consecutive failed steps after which a model is considered lost."""
FOR_GOOD = ("cuda error", "hip error", "device-side assert", "cublas", "cudnn", "nccl")
"""Lowercase fragments of the errors of a device whose context is no longer usable."""


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
