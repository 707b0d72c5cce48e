"""Waits for conditions, however long they take on a busy machine."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from flyspec.client import AdminClient

T = TypeVar("T")


async def until(condition: Callable[[], T | Awaitable[T]], seconds: float = 30.0) -> T:
    """Wait until the condition holds; return its value.

    Raises `AssertionError` with what it returned last if it does not hold in time.
    """
    found: T | None = None
    try:
        async with asyncio.timeout(seconds):
            while True:
                answer = condition()
                found = await answer if inspect.isawaitable(answer) else answer
                if found:
                    return found
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"not within {seconds} s; last it was {found!r}") from None


async def idle(admin: AdminClient) -> bool:
    """Wait until no generation and no session is left."""

    async def rests() -> bool:
        status = await admin.status()
        return not (
            status.verify.sessions.active
            or status.draft.sessions.active
            or status.active_generations
            or status.waiting_generations
        )

    return await until(rests)


def is_gone(pid: int) -> bool:
    """True if a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True
