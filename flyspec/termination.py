"""SIGTERM before a service can take it in order."""

from __future__ import annotations

import signal


def end_on_sigterm() -> None:
    """End this process on SIGTERM, from now until the service waits for it itself.

    To be called before anything that takes long is imported. The first process of a container has
    no default action: the kernel drops a SIGTERM that it has no handler for.
    """
    signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
