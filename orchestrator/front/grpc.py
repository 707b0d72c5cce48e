"""The gRPC face of the orchestrator to its clients: `GenerationService`.

gRPC's flow control makes a write wait until the client has room for the message, so a generation
does not run ahead of its reader by more than the client's own window, and nothing piles up here. A
client that takes nothing at all would hold a slot for ever; here its time is bounded.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing
from typing import Any

import grpc

from flyspec import rpc, wire
from flyspec.errors import DeadlineExceededError, FlyspecError, IdleTimeoutError
from flyspec.metadata import CLIENT_ID_KEY, TRACEPARENT_KEY
from flyspec.telemetry import request_id
from flyspec.v1 import generation_pb2, generation_pb2_grpc
from flyspec.values.generation import GenerationRequest
from orchestrator.admission.clients import Caller, address_of
from orchestrator.front.access import key_of_call
from orchestrator.generations import Generations

LONG_REQUEST_BYTES = 1 << 16
"""A longer request is read in a thread: a million empty messages of a chat take a second."""


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Streams generations.

    Each is the task that gRPC runs the handler in: when the client goes away the task is cancelled,
    and leaving it frees both services' sessions.
    """

    def __init__(self, generations: Generations, write_timeout_s: float) -> None:
        self._generations, self._write_timeout_s = generations, write_timeout_s

    @rpc.handler
    async def Generate(self, request: generation_pb2.GenerateRequest, context: Any) -> None:
        """One generation, within what there is room for and what its client takes."""
        caller = caller_of(context)
        try:
            if request.ByteSize() > LONG_REQUEST_BYTES:
                asked = await asyncio.to_thread(wire.decode, GenerationRequest, request)
            else:
                asked = wire.decode(GenerationRequest, request)
        except FlyspecError as error:
            self._generations.refuse(error, caller)
        async with aclosing(self._generations.run(asked, caller)) as events:
            async for event in events:
                try:
                    message = wire.encode(event)
                    await write(context, message, self._write_timeout_s, caller.deadline)
                except grpc.aio.BaseError:  # the call is over
                    raise
                except Exception as error:  # what the request is counted by
                    await events.athrow(error)

    @rpc.handler
    async def ListModels(
        self, request: generation_pb2.ListModelsRequest, context: Any
    ) -> generation_pb2.ListModelsResponse:
        """The target, the drafters and the rules."""
        models: generation_pb2.ListModelsResponse = wire.encode(self._generations.models())
        return models


def caller_of(context: Any) -> Caller:
    """What a call's context says of who makes it."""
    metadata: dict[str, Any] = {}
    for name, value in context.invocation_metadata() or ():
        if value:
            metadata.setdefault(name, value)
    left: float | None = context.time_remaining()
    return Caller(
        address=address_of(context.peer()),
        client_id=metadata.get(CLIENT_ID_KEY, ""),
        key=key_of_call(),
        deadline=None if left is None else asyncio.get_running_loop().time() + left,
        request_id=request_id(),
        traceparent=metadata.get(TRACEPARENT_KEY, ""),
    )


async def write(
    context: Any, message: Any, timeout_s: float, deadline: float | None = None
) -> None:
    """Send a message once the client has room. Raises `DeadlineExceededError` if it has none.

    By `timeout_s`, that is, or by the request's `deadline`. The call can then only be ended: a part
    of the message may be on its way.
    """
    left = math.inf if deadline is None else deadline - asyncio.get_running_loop().time()
    late = left < timeout_s
    try:
        await rpc.write(context, message, min(left, timeout_s))
    except IdleTimeoutError:
        raise DeadlineExceededError(
            "the request's deadline passed before the client had read what there is; read the "
            "stream as it comes, or allow more time"
            if late
            else f"the client read nothing for {timeout_s:g} s and the generation was ended; "
            "read the stream as it comes, or raise --write-timeout-s"
        ) from None
