"""The client API: `GenerationService`.

gRPC flow control blocks a write until the client has room for the message, so a generation never
runs further ahead than the client's window and nothing accumulates here. A client that stops
reading would hold its slot forever, so writes have a timeout.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any, TypeVar

import grpc

from flyspec import rpc, wire
from flyspec.concurrency import LONG, in_turn
from flyspec.errors import DeadlineExceededError, FlyspecError, IdleTimeoutError
from flyspec.metadata import CLIENT_ID_KEY, TRACEPARENT_KEY
from flyspec.telemetry import request_id, set_client
from flyspec.v1 import generation_pb2, generation_pb2_grpc
from flyspec.validation import LENGTHS
from flyspec.values.requests import GenerationRequest, ScoreRequest
from orchestrator.admission.admission import Visit
from orchestrator.admission.clients import Caller, address_of
from orchestrator.front.access import key_of_call
from orchestrator.generations import Generations

COUNTED = ("/Generate", "/Score")
"""Methods whose calls admission counts."""

T = TypeVar("T")
_visit: ContextVar[Visit | None] = ContextVar("visit", default=None)


class Arrivals:
    """Begins the visits of calls, before their requests are read; calls may be refused."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations

    def __call__(self, method: str, context: Any) -> None:
        if method.endswith(COUNTED):
            visit = self._generations.arrive(caller_of(context))
            context.add_done_callback(lambda _: visit.end())
            _visit.set(visit)


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Streams generations.

    A generation runs in its handler's task: gRPC cancels the task when the client disconnects,
    which frees the draft and target sessions.
    """

    def __init__(self, generations: Generations, write_timeout_s: float) -> None:
        self._generations, self._write_timeout_s = generations, write_timeout_s

    @rpc.handler
    async def Generate(self, request: generation_pb2.GenerateRequest, context: Any) -> None:
        caller = caller_of(context)
        asked = await self._decoded(GenerationRequest, request, caller)
        async with aclosing(self._generations.run(asked, caller)) as events:
            async for event in events:
                try:
                    message = wire.encode(event)
                    await write(context, message, self._write_timeout_s, caller.deadline)
                except grpc.aio.BaseError:  # the call is over
                    raise
                except Exception as error:  # so that the request is counted as failed
                    await events.athrow(error)

    @rpc.handler
    async def Score(self, request: generation_pb2.ScoreRequest, context: Any) -> None:
        caller = caller_of(context)
        asked = await self._decoded(ScoreRequest, request, caller)
        async with aclosing(self._generations.score(asked, caller)) as pieces:
            async for piece in pieces:
                message = wire.encode(piece)
                await write(context, message, self._write_timeout_s, caller.deadline)

    @rpc.handler
    async def ListModels(
        self, request: generation_pb2.ListModelsRequest, context: Any
    ) -> generation_pb2.ListModelsResponse:
        models: generation_pb2.ListModelsResponse = wire.encode(self._generations.models())
        return models

    async def _decoded(self, cls: type[T], request: Any, caller: Caller) -> T:
        """Return a request's value. Raises `FlyspecError`, counted as a request."""
        context_length = self._generations.target.info.model.context_length

        def decode() -> T:
            rpc.check_lists(request, LENGTHS, context_length, request.DESCRIPTOR)
            return wire.decode(cls, request)

        try:
            return await in_turn(decode) if request.ByteSize() > LONG else decode()
        except FlyspecError as error:
            self._generations.refuse(error, caller)


def caller_of(context: Any) -> Caller:
    metadata: dict[str, Any] = {}
    for name, value in context.invocation_metadata() or ():
        if value:
            metadata.setdefault(name, value)
    left: float | None = context.time_remaining()
    caller = Caller(
        address=address_of(context.peer()),
        client_id=metadata.get(CLIENT_ID_KEY, ""),
        key=key_of_call(),
        deadline=None if left is None else asyncio.get_running_loop().time() + left,
        request_id=request_id(),
        traceparent=metadata.get(TRACEPARENT_KEY, ""),
        visit=_visit.get(),
    )
    set_client(caller.shown)
    return caller


async def write(
    context: Any, message: Any, timeout_s: float, deadline: float | None = None
) -> None:
    """Send a message once the client has room for it.

    Raises `DeadlineExceededError` if it has none within `timeout_s` or by the request's `deadline`.
    The call must then end: part of the message may already have been sent.
    """
    left = math.inf if deadline is None else deadline - asyncio.get_running_loop().time()
    late = left < timeout_s
    try:
        await rpc.write(context, message, min(left, timeout_s))
    except IdleTimeoutError:
        raise DeadlineExceededError(
            "the request's deadline passed while the client had unread output; read the stream "
            "as it arrives, or allow more time"
            if late
            else f"generation ended because the client read nothing for {timeout_s:g} s; "
            "read the stream as it arrives, or raise --write-timeout-s"
        ) from None
