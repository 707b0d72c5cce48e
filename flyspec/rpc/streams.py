"""Reads and writes a stream's messages with timeouts for silent clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

import grpc

from flyspec.errors import IdleTimeoutError, InvalidArgumentError

T = TypeVar("T")


class Malformed:
    """An unreadable request, with protobuf's error."""

    __slots__ = ("reason",)

    def __init__(self, reason: Exception) -> None:
        self.reason = reason


async def unbroken(reading: Coroutine[Any, Any, T]) -> T:
    """Await `reading`; if cancelled, leave it running until its call ends.

    grpc.aio leaks memory for each cancelled read (in 1.85: 80 bytes without a message, up to 8 KB
    with one).
    """
    task = asyncio.ensure_future(reading)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        unhandled(task)
        raise


def unhandled(task: asyncio.Future[T]) -> asyncio.Future[T]:
    """Return the task, whose error asyncio is not to log if nobody is left to handle it."""
    task.add_done_callback(_forget)
    return task


def _forget(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()


async def in_time(reading: Awaitable[T], idle_timeout_s: float) -> T:
    """Await `reading`; raise `IdleTimeoutError` after that many seconds."""
    try:
        async with asyncio.timeout(idle_timeout_s):
            return await reading
    except TimeoutError as error:
        raise IdleTimeoutError(
            f"no message for {idle_timeout_s:g} s; the call was closed, open another"
        ) from error


async def read_ahead(
    read: Callable[[], Coroutine[Any, Any, T | None]],
    idle_timeout_s: float,
    interrupt: Callable[[], None],
) -> AsyncGenerator[T]:
    """Yield a stream's requests until `read` returns None, reading one ahead.

    When the next request arrives during an answer, `interrupt` is called to end that answer; the
    end of the stream does not interrupt. Between answers the client may be silent for
    `idle_timeout_s`, else `IdleTimeoutError` is raised.
    """
    reader = _Reader(read, interrupt)
    try:
        while (request := await in_time(reader.next(), idle_timeout_s)) is not None:
            reader.answering = True
            yield request
            reader.answering = False
    finally:
        reader.close()


class _Reader(Generic[T]):
    """Reads one request ahead in a task that is never cancelled while reading (see `unbroken`)."""

    def __init__(
        self, read: Callable[[], Coroutine[Any, Any, T | None]], interrupt: Callable[[], None]
    ) -> None:
        self._read, self._interrupt = read, interrupt
        self._came = asyncio.Queue[T | Exception | None](1)
        self._closed = self.answering = False
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        request: T | Exception | None
        while not self._closed:
            try:
                request = await self._read()
            except Exception as error:
                request = error
            await self._came.put(request)
            if request is None or isinstance(request, Exception):
                return
            if self.answering:  # the previous one, while this one waits in the queue
                self._interrupt()

    async def next(self) -> T | None:
        request = await self._came.get()
        if isinstance(request, Exception):
            raise request
        return request

    def close(self) -> None:
        """Stop; the pending read ends with its call."""
        self._closed, self.answering = True, False
        if not self._came.empty():
            self._came.get_nowait()


def unparsable(reason: Exception) -> InvalidArgumentError:
    """Return the error for a request that protobuf cannot parse."""
    return InvalidArgumentError(f"the request cannot be parsed: {reason}")


async def receive(context: Any) -> Any:
    """Return the next message of a stream, None at its end. Must not be cancelled (`unbroken`)."""
    message = await context.read()
    if isinstance(message, Malformed):
        raise unparsable(message.reason)
    return None if message is grpc.aio.EOF else message


async def read(context: Any, idle_timeout_s: float) -> Any:
    """Like `receive`, but cancellable; raises `IdleTimeoutError` if no message comes."""
    return await in_time(unbroken(receive(context)), idle_timeout_s)


async def write(context: Any, message: Any, idle_timeout_s: float) -> None:
    """Write to a stream; raise `IdleTimeoutError` if the client does not read for that long."""
    try:
        async with asyncio.timeout(idle_timeout_s):
            await context.write(message)
    except TimeoutError as error:
        raise IdleTimeoutError(
            f"the client read nothing for {idle_timeout_s:g} s; open another session"
        ) from error
