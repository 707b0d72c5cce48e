"""Something around a call, whatever its shape: what server interceptors have in common."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc

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
