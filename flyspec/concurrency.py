"""Running coroutines at the same time, and ending them with what they have reached."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class StoppedEarly(KeyboardInterrupt):
    """Ctrl-C was pressed; `reached` is what the work returned all the same."""

    def __init__(self, reached: Any) -> None:
        super().__init__()
        self.reached = reached


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


def interrupted() -> bool:
    """Whether this task was asked to end, and goes on to report what it has reached."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
