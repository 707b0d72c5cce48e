"""What some files hold, read again when they change, without a restart."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from flyspec.errors import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")
_State = tuple[tuple[int, int, int, int] | None, ...]


class Watched(Generic[T]):
    """The value that `read` makes of the files at `paths`, as they are now.

    `read` raises `ConfigError` for files that cannot be used: from here when they are read first;
    later that is logged and the value stays what it was, until they change again. So files that
    belong together may be written one after the other. Links are followed: Kubernetes swaps one.
    """

    def __init__(self, what: str, paths: Sequence[str], read: Callable[[], T]) -> None:
        self._what, self._paths, self._read = what, tuple(paths), read
        self._lock = threading.Lock()  # gRPC asks from threads of its own
        self._state = self._look()
        self._value = read()

    def current(self) -> T:
        """The value now; the same object as long as the files stay the same."""
        with self._lock:
            state = self._look()
            if state != self._state:
                self._state = state
                try:
                    self._value = self._read()
                except ConfigError as error:
                    log.error("%s changed and cannot be used, the old stays: %s", self._what, error)
                else:
                    log.info("%s changed and was read again", self._what)
            return self._value

    def _look(self) -> _State:
        """What tells two versions of the files apart."""
        found: list[tuple[int, int, int, int] | None] = []
        for path in self._paths:
            try:
                status = os.stat(path)
            except OSError:
                found.append(None)
            else:
                found.append((status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size))
        return tuple(found)


def read_bytes(path: str, flag: str) -> bytes:
    """A file's content. Raises `ConfigError` that names the setting it comes from."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror or error}") from None
