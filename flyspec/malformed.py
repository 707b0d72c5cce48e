"""Requests that are no messages of their type: INVALID_ARGUMENT, where grpc.aio would say UNKNOWN.

A deserializer that fails raises out of reach of any servicer. So here none does: what cannot be
read arrives as `Malformed`, and whoever reads it first raises the error.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from flyspec.errors import InvalidArgumentError

Abort = Callable[[Any, str, Exception], Awaitable[None]]


class Malformed:
    """Stands for a request that cannot be read; `reason` is protobuf's."""

    __slots__ = ("reason",)

    def __init__(self, reason: Exception) -> None:
        self.reason = reason


def check_read(message: Any) -> None:
    """Raise `InvalidArgumentError` for what stands for a request that cannot be read."""
    if isinstance(message, Malformed):
        raise InvalidArgumentError(f"the request cannot be read: {message.reason}")


class MalformedRequests(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Ends calls whose requests cannot be read, by `abort(context, method, error)`.

    A servicer that reads its stream by `context.read` must call `check_read` itself.
    """

    def __init__(self, abort: Abort) -> None:
        self._abort = abort

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """The call's handler, wrapped; None if there is no such method."""
        found = await continuation(handler_call_details)
        return found and _wrap(found, handler_call_details.method, self._abort)


def _wrap(found: Any, method: str, abort: Abort) -> Any:
    """The same handler, with a deserializer that does not raise and a look at what it gave."""
    kind = (
        f"{'stream' if found.request_streaming else 'unary'}_"
        f"{'stream' if found.response_streaming else 'unary'}"
    )
    behavior, parse = getattr(found, kind), found.request_deserializer
    look = _look_at_each if found.request_streaming else _look_at_one

    def read_request(data: bytes) -> Any:
        try:
            return parse(data)
        except Exception as error:
            return Malformed(error)

    async def call(request: Any, context: Any) -> Any:
        try:
            return await behavior(look(request), context)
        except InvalidArgumentError as error:
            await abort(context, method, error)

    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for response in behavior(look(request), context):
                yield response
        except InvalidArgumentError as error:
            await abort(context, method, error)

    wrapped = generate if inspect.isasyncgenfunction(behavior) else call
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(wrapped, read_request, found.response_serializer)


def _look_at_one(request: Any) -> Any:
    check_read(request)
    return request


async def _look_at_each(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        check_read(request)
        yield request
