"""Requests that are no messages of their type: INVALID_ARGUMENT, where grpc.aio would say UNKNOWN.

A deserializer that fails raises out of reach of any servicer. So here none does: what cannot be
read arrives as `Malformed`, and whoever reads it first raises the error. A call that never sends
the one request that its method takes would wait for good; here it is told so.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from flyspec.errors import FlyspecError, InvalidArgumentError, UnimplementedError
from flyspec.interceptors import Interceptor
from flyspec.rpc.streams import Malformed, read

REQUEST_TIMEOUT_S = 30.0
"""A call without its first message after so long is ended: nothing limits their number."""
STREAM_TIMEOUT_S = 300.0
"""So is one without its next message, if its servicer leaves the reading to this module."""

Abort = Callable[[Any, str, Exception], Awaitable[None]]


class MalformedRequests(Interceptor):
    """Ends calls whose requests cannot be read, by `abort(context, method, error)`.

    A servicer that reads its stream itself does so by `streams.read`.
    """

    def __init__(self, abort: Abort) -> None:
        self._abort = abort

    def around_method(self, found: Any, details: Any) -> Any:
        """The call's handler, which is not called with what cannot be read."""
        return _wrap(found, details.method, self._abort)


def _wrap(found: Any, method: str, abort: Abort) -> Any:
    """The same handler, with a deserializer that does not raise and a look at what it gave.

    For grpc.aio it takes a stream, so that the one request of other methods is read here.
    """
    answer = "stream" if found.response_streaming else "unary"
    takes = "stream" if found.request_streaming else "unary"
    behavior, parse = getattr(found, f"{takes}_{answer}"), found.request_deserializer

    def read_request(data: bytes) -> Any:
        try:
            return parse(data)
        except Exception as error:
            return Malformed(error)

    async def request_of(context: Any) -> Any:
        if found.response_streaming:
            # Apart from the first message: as long as that waits for its reader, no status could
            # be sent either, and a call that is ended then would stay open for good.
            try:
                await context.send_initial_metadata(())
            except grpc.aio.InternalError as error:
                raise asyncio.CancelledError from error  # the client has gone already
        return _checked(context) if found.request_streaming else await _only_one(context)

    async def call(requests: Any, context: Any) -> Any:
        try:
            return await behavior(await request_of(context), context)
        except FlyspecError as error:
            await abort(context, method, error)
        except NotImplementedError:  # health's List, which grpc's servicer for asyncio lacks
            await abort(context, method, UnimplementedError(f"{method} is not implemented"))

    async def generate(requests: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for response in behavior(await request_of(context), context):
                yield response
        except FlyspecError as error:
            await abort(context, method, error)

    wrapped = generate if inspect.isasyncgenfunction(behavior) else call
    make = getattr(grpc, f"stream_{answer}_rpc_method_handler")
    return make(wrapped, read_request, found.response_serializer)


async def _only_one(context: Any) -> Any:
    """The request of a method that takes one."""
    request = await read(context, REQUEST_TIMEOUT_S)
    if request is None:
        raise InvalidArgumentError("the call ended without a request; this method takes one")
    return request


async def _checked(context: Any) -> AsyncIterator[Any]:
    while (request := await read(context, STREAM_TIMEOUT_S)) is not None:
        yield request
