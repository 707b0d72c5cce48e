"""Measurements that Ctrl-C ends early, with what they have reached."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from flyspec.concurrency import StoppedEarly, interrupted

T = TypeVar("T")
V = TypeVar("V")


def whatever_reached(work: Callable[[], T], then: Callable[[T], V]) -> V:
    """Return what `then` makes of the work's result, also if Ctrl-C ended the work early.

    Raises `StoppedEarly` with it in that case.
    """
    try:
        result = work()
    except StoppedEarly as end:
        raise StoppedEarly(then(end.reached)) from None
    return then(result)


class UntilCtrlC:
    """A context that Ctrl-C leaves, after which the program goes on, once something was `reached`.

    For work that is not a coroutine; `until_interrupted` is for those.
    """

    def __init__(self) -> None:
        self.reached = self.stopped = False

    def __enter__(self) -> UntilCtrlC:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self.stopped = kind is KeyboardInterrupt and self.reached
        return self.stopped

    def result(self, found: T) -> T:
        """Return what was found. Raises `StoppedEarly` with it if Ctrl-C was pressed."""
        if self.stopped:
            raise StoppedEarly(found)
        return found


until_interrupted = partial(contextlib.suppress, asyncio.CancelledError)
"""A context that is left when this task is cancelled; what follows it goes on."""


def check_reached(reached: object) -> None:
    """Raise `CancelledError` if this task was asked to end before anything was reached."""
    if interrupted() and not reached:
        raise asyncio.CancelledError
