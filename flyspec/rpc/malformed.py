"""Ends calls with malformed requests with INVALID_ARGUMENT, where grpc.aio would say UNKNOWN.

An exception in a deserializer reaches no servicer. So none is raised here: an unreadable request
becomes `Malformed`, and the reader that receives it raises the error. The request of a unary method
is parsed after it was read, in turn if it is long. Also ends calls that never send their request,
which would otherwise wait forever, and unary ones that send more than one.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from flyspec.concurrency import LONG, in_turn
from flyspec.errors import FlyspecError, InvalidArgumentError, UnimplementedError
from flyspec.interceptors import Interceptor
from flyspec.rpc.sizes import check_parts
from flyspec.rpc.statuses import abort
from flyspec.rpc.streams import Malformed, read, unparsable

REQUEST_TIMEOUT_S = 30.0
"""Seconds that a call may take to send its first message; nothing else limits idle calls."""
STREAM_TIMEOUT_S = 300.0
"""Seconds between messages of a stream that this module reads for the servicer."""


class MalformedRequests(Interceptor):
    """Ends calls whose requests cannot be read with that error's status.

    To grpc.aio every method takes a stream; a unary method's request is read here. A servicer that
    reads its stream itself must use `streams.read`.
    """

    def around_method(self, found: Any, details: Any) -> Any:
        method = details.method
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
                # Not with the first message: while that waits for its reader, no status could be
                # sent either, and an aborted call would stay open forever.
                try:
                    await context.send_initial_metadata(())
                except grpc.aio.InternalError as error:
                    raise asyncio.CancelledError from error  # the client is already gone
            if found.request_streaming:
                return _checked(context)
            return await _only_one(context, parse)

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
        reader = read_request if found.request_streaming else bytes
        return make(wrapped, reader, found.response_serializer)


async def _parsed(data: bytes, parse: Callable[[bytes], Any]) -> Any:
    """Parse a request. Raises `InvalidArgumentError`."""

    def checked() -> Any:
        check_parts(data, parse.__self__.DESCRIPTOR)  # type: ignore[attr-defined]
        return parse(data)

    try:
        return await in_turn(checked) if len(data) > LONG else parse(data)
    except DecodeError as error:
        raise unparsable(error) from None


async def _only_one(context: Any, parse: Callable[[bytes], Any]) -> Any:
    """Read and parse the request of a unary method, and read the end that must follow it.

    If a call returns with messages unread, its client's connection may stay open as long as the
    client's process, whose channel is closed (grpcio 1.85), and hold 70 KB or more of this one.
    """
    request = await read(context, REQUEST_TIMEOUT_S)
    if request is None:
        raise InvalidArgumentError("the call ended without its request")
    request = await _parsed(request, parse)
    if await read(context, REQUEST_TIMEOUT_S) is not None:
        raise InvalidArgumentError("the call has more than one request; this method takes one")
    return request


async def _checked(context: Any) -> AsyncIterator[Any]:
    while (request := await read(context, STREAM_TIMEOUT_S)) is not None:
        yield request
