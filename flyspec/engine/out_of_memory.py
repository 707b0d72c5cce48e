"""Recognises out-of-memory errors by their class names and messages, without importing torch."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from flyspec.errors import ConfigError

_CLASSES = {"MemoryError", "OutOfMemoryError"}
_MESSAGES = (
    "can't allocate memory",  # torch's allocator on Linux
    "cannot allocate memory",
    "not enough memory",  # on other systems
    "out of memory",
    "cublas_status_alloc_failed",
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """True if an error, or one it was raised from, means that a device or the host has no memory.

    torch raises `OutOfMemoryError` on a GPU and a plain `RuntimeError` on the CPU; numpy raises
    `MemoryError`, and system calls raise `OSError`.
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
    """Return the error for running out of memory while `doing` something with a model."""
    reason = " ".join(str(error).split()) or repr(error)
    return ConfigError(
        f"--model {name}: out of memory while {doing}: {reason:.300}; lower --max-model-len, "
        "--max-sessions or --kv-cache-memory-bytes"
    )


@contextmanager
def naming_memory(name: str, doing: str) -> Iterator[None]:
    """Turn out-of-memory errors into a `ConfigError` that says so; let other errors pass."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ConfigError) or not is_out_of_memory(error):
            raise
        raise no_memory(name, doing, error) from error
