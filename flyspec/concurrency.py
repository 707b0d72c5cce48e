"""Coroutines that run at the same time, long work in turn, and the end of either by Ctrl-C."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
LONG = 1 << 12
"""Bytes of a request, or characters or tokens of a prompt, above which its work is done `in_turn`.

Reading a byte takes up to 5 µs, and encoding a character as long."""
_turns = ThreadPoolExecutor(1, "in-turn")


class StoppedEarly(KeyboardInterrupt):
    """Ctrl-C was pressed; `reached` is what the work returned all the same."""

    def __init__(self, reached: Any) -> None:
        super().__init__()
        self.reached = reached


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


def interrupted() -> bool:
    """True if this task was asked to end, and goes on to report what it has reached."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
