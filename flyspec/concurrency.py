"""Running coroutines at the same time, and ending them with what they have reached."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
V = TypeVar("V")
LONG = 1 << 12
"""Bytes of a request, or characters or tokens of a prompt, above which its work is done `in_turn`.

Reading a byte takes up to 5 µs, and encoding a character as long."""
_turns = ThreadPoolExecutor(1, "in-turn")


class StoppedEarly(KeyboardInterrupt):
    """Ctrl-C was pressed; `reached` is what the work returned all the same."""

    def __init__(self, reached: Any) -> None:
        super().__init__()
        self.reached = reached


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


async def in_turn(work: Callable[[], T]) -> T:
    """Do a long request's work in the process's one thread for it, after the work before it.

    One thread, since each that runs Python keeps the event loop waiting, by up to 5 ms at a time.
    """
    return await asyncio.get_running_loop().run_in_executor(_turns, work)


async def all_or_first_error(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all concurrently; the first error cancels the rest and is raised unchanged."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def until_interrupted() -> Iterator[None]:
    """Leave the block when this task is cancelled, and go on after it."""
    with contextlib.suppress(asyncio.CancelledError):
        yield


def check_reached(reached: object) -> None:
    """Raise `CancelledError` if this task was asked to end before anything was reached."""
    if interrupted() and not reached:
        raise asyncio.CancelledError


def interrupted() -> bool:
    """True if this task was asked to end, and goes on to report what it has reached."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
