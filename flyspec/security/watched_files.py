"""Values read from files, reloaded when the files change."""

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
    """The result of `read`, repeated whenever the files at `paths` change.

    A `ConfigError` from the first `read` is raised; a later one is logged, and the old value kept
    until the files change again. So files that belong together may be written one by one. Follows
    symbolic links, which Kubernetes swaps.
    """

    def __init__(self, what: str, paths: Sequence[str], read: Callable[[], T]) -> None:
        self._what, self._paths, self._read = what, tuple(paths), read
        self._lock = threading.Lock()  # gRPC calls from its own threads
        self._state = self._look()
        self._value = read()

    def current(self) -> T:
        """Return the current value; the same object while the files are unchanged."""
        with self._lock:
            state = self._look()
            if state != self._state:
                self._state = state
                try:
                    self._value = self._read()
                except ConfigError as error:
                    log.error("cannot reload %s, keeping the old: %s", self._what, error)
                else:
                    log.info("reloaded %s", self._what)
            return self._value

    def _look(self) -> _State:
        """Return a state that differs whenever a file has changed."""
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
    """Read a file. Raises `ConfigError`, naming the setting `flag`."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror or error}") from None
