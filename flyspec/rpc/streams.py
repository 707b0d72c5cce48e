"""Reading and writing a stream's messages, for as long as its client may be silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

import grpc

from flyspec.errors import IdleTimeoutError, InvalidArgumentError

T = TypeVar("T")


class Malformed:
    """Stands for a request that cannot be read; `reason` is protobuf's."""

    __slots__ = ("reason",)

    def __init__(self, reason: Exception) -> None:
        self.reason = reason


async def unbroken(reading: Coroutine[Any, Any, T]) -> T:
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


async def in_time(reading: Awaitable[T], idle_timeout_s: float) -> T:
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
    reader = _Reader(read, interrupt)
    try:
        while (request := await in_time(reader.next(), idle_timeout_s)) is not None:
            reader.answering = True
            yield request
            reader.answering = False
    finally:
        reader.close()


class _Reader(Generic[T]):
    """Reads one request ahead, in a task that is never cancelled while it reads (`unbroken`)."""

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
            if self.answering:  # the one before: this one waits in the queue
                self._interrupt()

    async def next(self) -> T | None:
        """The next request; raises what reading it raised."""
        request = await self._came.get()
        if isinstance(request, Exception):
            raise request
        return request

    def close(self) -> None:
        """Nobody asks for more: the read under way ends with its call."""
        self._closed, self.answering = True, False
        if not self._came.empty():
            self._came.get_nowait()


async def receive(context: Any) -> Any:
    """The next message of a stream, None at its end; not to be cancelled (`unbroken`)."""
    message = await context.read()
    if isinstance(message, Malformed):
        raise InvalidArgumentError(f"the request cannot be read: {message.reason}")
    return None if message is grpc.aio.EOF else message


async def read(context: Any, idle_timeout_s: float) -> Any:
    """As `receive`, by whoever may be cancelled; `IdleTimeoutError` when none comes."""
    return await in_time(unbroken(receive(context)), idle_timeout_s)


async def write(context: Any, message: Any, idle_timeout_s: float) -> None:
    """Send a message of a stream; `IdleTimeoutError` when the client does not read for so long."""
    try:
        async with asyncio.timeout(idle_timeout_s):
            await context.write(message)
    except TimeoutError as error:
        raise IdleTimeoutError(
            f"nothing was read for {idle_timeout_s:g} s; the session is closed, open another"
        ) from error
