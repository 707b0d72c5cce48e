"""Reading and writing a stream's messages, for as long as its client may be silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import grpc

from flyspec.errors import IdleTimeoutError, InvalidArgumentError

T = TypeVar("T")


class Malformed:
    """Stands for a request that cannot be read; `reason` is protobuf's."""

    __slots__ = ("reason",)

    def __init__(self, reason: Exception) -> None:
        self.reason = reason


async def unbroken(reading: Coroutine[Any, Any, Any]) -> Any:
    """What `reading` gives; who is cancelled here leaves it to end with its call.

    grpc.aio never frees the message of a read that is cancelled itself (seen in 1.85: 80 bytes when
    none came, up to 8 KB of its buffers when one did).
    """
    task = asyncio.ensure_future(reading)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_forget)
        raise


def _forget(task: asyncio.Task[Any]) -> None:
    """Take a result that nobody waits for, so that asyncio does not complain of it."""
    if not task.cancelled():
        task.exception()


async def in_time(reading: Awaitable[T], idle_timeout_s: float | None) -> T:
    """What `reading` gives; `IdleTimeoutError` when it gives nothing for so long."""
    try:
        async with asyncio.timeout(idle_timeout_s):
            return await reading
    except TimeoutError as error:
        raise IdleTimeoutError(
            f"no message for {idle_timeout_s:g} s; the call is closed, open another"
        ) from error


async def read_ahead(
    read: Callable[[], Coroutine[Any, Any, T | None]],
    idle_timeout_s: float,
    interrupt: Callable[[], None],
) -> AsyncGenerator[T]:
    """A stream's requests, until `read` gives None; the next is read while one is answered.

    When it has come, `interrupt` is called, to end that answer; the end of the stream ends none. As
    long as a request is answered its client may be silent, between two for `idle_timeout_s`, or
    `IdleTimeoutError`.
    """
    answered: T | None = None

    def end(request: T, reading: asyncio.Future[T | None]) -> None:
        # asyncio tells of it a turn of the loop later: by then another one may be answered.
        if reading.cancelled() or reading.exception() or request is not answered:
            return
        if reading.result() is not None:
            interrupt()

    reading = asyncio.ensure_future(read())
    try:
        while (request := await in_time(reading, idle_timeout_s)) is not None:
            reading = asyncio.ensure_future(read())
            reading.add_done_callback(partial(end, request))
            answered = request
            yield request
            answered = None
    finally:
        reading.cancel()


async def read(context: Any, idle_timeout_s: float | None) -> Any:
    """The next message of a stream, None at its end; `IdleTimeoutError` when none comes."""
    message = await in_time(unbroken(context.read()), idle_timeout_s)
    if isinstance(message, Malformed):
        raise InvalidArgumentError(f"the request cannot be read: {message.reason}")
    return None if message is grpc.aio.EOF else message


async def write(context: Any, message: Any, idle_timeout_s: float) -> None:
    """Send a message of a stream; `IdleTimeoutError` when the client does not read for so long."""
    try:
        async with asyncio.timeout(idle_timeout_s):
            await context.write(message)
    except TimeoutError as error:
        raise IdleTimeoutError(
            f"nothing was read for {idle_timeout_s:g} s; the session is closed, open another"
        ) from error
