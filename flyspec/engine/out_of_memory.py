"""Tells running out of memory from other failures, by names and messages: without torch."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from flyspec.errors import ConfigError

_CLASSES = {"MemoryError", "OutOfMemoryError"}
_MESSAGES = (
    "can't allocate memory",  # torch's allocator on Linux
    "cannot allocate memory",
    "not enough memory",  # and elsewhere
    "out of memory",
    "cublas_status_alloc_failed",
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what it was raised from, is that a device or the host has no memory.

    torch raises `OutOfMemoryError` for a GPU and a plain `RuntimeError` for the CPU; numpy raises
    `MemoryError`, and the system call `OSError`.
    """
    while error is not None:
        if _CLASSES & {kind.__name__ for kind in type(error).__mro__}:
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        text = str(error).lower()
        if isinstance(error, RuntimeError) and any(message in text for message in _MESSAGES):
            return True
        error = error.__cause__
    return False


def no_memory(name: str, doing: str, error: Exception) -> ConfigError:
    """The error for a model that has no room for what was done with it, `doing` in the past."""
    reason = " ".join(str(error).split()) or repr(error)
    return ConfigError(
        f"--model {name}: out of memory while {doing}: {reason:.300}; lower --max-model-len, "
        "--max-sessions or --kv-cache-memory-bytes"
    )


@contextmanager
def naming_memory(name: str, doing: str) -> Iterator[None]:
    """Call running out of memory that; other errors stay as they are. Raises `ConfigError`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ConfigError) or not is_out_of_memory(error):
            raise
        raise no_memory(name, doing, error) from error
