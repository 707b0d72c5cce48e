"""What a service does before it can serve: it ends on SIGTERM, and imports without collecting."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Iterator
from typing import NoReturn


def end_on_sigterm() -> None:
    """End this process on SIGTERM, from now until the service waits for it itself.

    To be called before anything that takes long is imported. The first process of a container has
    no default action: the kernel drops a SIGTERM that it has no handler for. The exit code is 143.
    """
    signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: object) -> NoReturn:
    # Not by an exception: raised inside an import it is swallowed, or leaves half a module behind.
    os._exit(128 + number)


@contextlib.contextmanager
def large_imports() -> Iterator[None]:
    """Import without garbage collections, which find nothing there and take a third of the time.

    Measured: torch, transformers and what the verify service needs of them, 4.9 s with, 3.2 s
    without. What was imported is left out of later collections, too.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
