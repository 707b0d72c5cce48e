"""What a failed step of a model tells: whether to hope for the next one. Imports no torch."""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from flyspec.engine.out_of_memory import is_out_of_memory
from flyspec.errors import ModelFailureError

MOST_IN_ROW = 3
"""Failed steps, and none between them that worked, after which a model is taken for lost."""
FOR_GOOD = ("cuda error", "hip error", "device-side assert", "cublas", "cudnn", "nccl")
"""In what a device raises whose context is of no use any more, in lower case."""


def is_for_good(error: BaseException) -> bool:
    """Whether no later step can work in this process: a device's error is told again and again.

    By its words, as torch raises RuntimeError for most of them. Out of memory passes.
    """
    text = f"{type(error).__name__} {error}".lower()
    return not is_out_of_memory(error) and (
        "acceleratorerror" in text or any(words in text for words in FOR_GOOD)
    )


class Failures:
    """Of one model's steps. `lost` has the reason once the process had better be restarted."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._in_row = 0
        self.num_total = 0
        self.lost: Future[str] = Future()

    def failed(self, error: Exception) -> ModelFailureError:
        """A step failed; what whoever waits for it is told."""
        self.num_total += 1
        self._in_row += 1
        what = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
        if is_for_good(error):
            self.lose(f"its device failed: {what}")
        elif self._in_row >= MOST_IN_ROW:
            self.lose(f"{self._in_row} steps in a row failed, the last with {what}")
        return ModelFailureError(f"the model of the {self._service} service failed: {what}")

    def worked(self) -> None:
        """A step worked."""
        self._in_row = 0

    def lose(self, reason: str) -> None:
        """No step is hoped for any more; the first reason counts. From any thread."""
        with suppress(InvalidStateError):
            self.lost.set_result(reason)
