"""Something around a call, whatever its shape: what server interceptors have in common."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc


class Interceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Puts something around every call, by `around_method`."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """The call's handler, wrapped; None if there is no such method."""
        found = await continuation(handler_call_details)
        return found and self.around_method(found, handler_call_details)

    def around_method(self, found: Any, details: Any) -> Any:
        """The handler to use for one that was found; `details` has the call's method."""
        return found


Around = Callable[[Any], AbstractAsyncContextManager[None]]
"""Makes a block of a call's context; the call runs inside it."""


def wrap(found: Any, around: Around) -> Any:
    """The same method handler, each of its calls inside a block of `around`."""
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
