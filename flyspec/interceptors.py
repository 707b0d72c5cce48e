"""Base class of server interceptors: wraps calls of any shape (unary or streaming)."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc


class Interceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Wraps the handler of every method with `around_method`."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        found = await continuation(handler_call_details)  # None: no such method
        return found and self.around_method(found, handler_call_details)

    def around_method(self, found: Any, details: Any) -> Any:
        """Return the handler to use instead of `found`; `details` has the call's method."""
        raise NotImplementedError


Around = Callable[[Any], AbstractAsyncContextManager[None]]
"""Returns a context manager for a call, given its context."""


def wrap(found: Any, around: Around) -> Any:
    """Return a method handler whose calls run inside `around(context)`."""
    takes = "stream" if found.request_streaming else "unary"
    kind = f"{takes}_{'stream' if found.response_streaming else 'unary'}"
    behavior = getattr(found, kind)

    async def call(request: Any, context: Any) -> Any:
        async with around(context):
            return await behavior(request, context)

    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        async with around(context):
            async for response in behavior(request, context):
                yield response

    wrapped = generate if inspect.isasyncgenfunction(behavior) else call
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(wrapped, found.request_deserializer, found.response_serializer)
