"""The `DraftService` servicer: protobuf in, protobuf out, one session per stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from time import perf_counter_ns
from typing import Any

from draft_service.sessions import ClientSession, Sessions
from draft_service.telemetry import DraftTelemetry
from flyspec import rpc, wire
from flyspec.errors import InvalidArgumentError, PrefixMismatchError
from flyspec.rpc.malformed import REQUEST_TIMEOUT_S
from flyspec.telemetry import Telemetry
from flyspec.v1 import draft_pb2, draft_pb2_grpc
from flyspec.validation import BIAS_LENGTH
from flyspec.values.admin import TokenizerFacts
from flyspec.values.rounds import DraftAdvance, DraftOpen


class DraftService(draft_pb2_grpc.DraftServiceServicer):
    """Answers `Describe`, `Draft` and `AddTokenizer` for a set of sessions."""

    def __init__(self, sessions: Sessions, observer: DraftTelemetry | None = None) -> None:
        self._sessions = sessions
        self._observer = observer or DraftTelemetry(Telemetry("draft"))
        room = sessions.max_length
        sequence = (room, f"tokens, but this service's drafters hold at most {room}; shorten it")
        self._lengths = {
            "open": {"token_ids": sequence, "sampling.logit_bias": BIAS_LENGTH},
            "advance": {"append_token_ids": sequence},
        }

    @rpc.handler
    async def Describe(
        self, request: draft_pb2.DraftServiceDescribeRequest, context: Any
    ) -> draft_pb2.DraftServiceDescribeResponse:
        info: draft_pb2.DraftServiceDescribeResponse = wire.encode(self._sessions.describe())
        return info

    @rpc.handler
    async def Draft(self, requests: Any, context: Any) -> None:
        """Run one session: an `open`, then any number of `advance`, one proposal each."""
        timeout_s = min(REQUEST_TIMEOUT_S, self._sessions.settings.idle_timeout_s)
        message = await rpc.read(context, timeout_s)
        if message is None:
            return
        first = self._request(message)
        if not isinstance(first, DraftOpen):
            raise InvalidArgumentError("DraftRequest.request: the first message must be open")
        with self._sessions.open(first) as session, self._observer.session(session):
            await session.prepare()
            last_round_id, idle_s = -1, self._sessions.settings.idle_timeout_s
            # The next request ends the current proposal.
            asked: AsyncGenerator[DraftOpen | DraftAdvance] = rpc.read_ahead(
                lambda: self._next(context), idle_s, session.interrupt
            )
            async with aclosing(asked):
                async for request in asked:
                    last_round_id = await self._propose(session, request, last_round_id, context)

    @rpc.handler
    async def AddTokenizer(self, requests: Any, context: Any) -> draft_pb2.AddTokenizerResponse:
        async def messages() -> AsyncIterator[TokenizerFacts | bytes]:
            while (message := await rpc.read(context, REQUEST_TIMEOUT_S)) is not None:
                yield wire.unwrap(message)

        await self._sessions.tokenizers.receive(messages())
        return draft_pb2.AddTokenizerResponse()

    async def _propose(
        self,
        session: ClientSession,
        request: DraftOpen | DraftAdvance,
        last_round_id: int,
        context: Any,
    ) -> int:
        """Answer one `advance`, chunk by chunk, and return its round's id."""
        arrival_ns = perf_counter_ns()
        if not isinstance(request, DraftAdvance):
            raise InvalidArgumentError(
                "DraftRequest.request: open is only allowed as the first message; "
                "use another stream for another session"
            )
        if request.round_id <= last_round_id:
            raise PrefixMismatchError(
                f"advance.round_id is {request.round_id} after {last_round_id}, but each round "
                "must arrive once and in order; open a new session with the whole sequence"
            )
        await session.move(request, arrival_ns)
        idle_s, last = self._sessions.settings.idle_timeout_s, False
        while not last:
            chunk = await session.next_chunk()
            response, last = wire.encode(chunk), chunk.last
            if last:
                response.service_ns = perf_counter_ns() - arrival_ns
            await rpc.write(context, response, idle_s)
        self._observer.proposed(session, request, arrival_ns, chunk, response.service_ns)
        if request.ahead is not None:
            while (made := await session.next_ahead()) is not None:
                await rpc.write(context, wire.encode(made), idle_s)
        return request.round_id

    async def _next(self, context: Any) -> DraftOpen | DraftAdvance | None:
        message = await rpc.receive(context)
        return None if message is None else self._request(message)

    def _request(self, message: Any) -> DraftOpen | DraftAdvance:
        rpc.check_request_lengths(message, self._lengths)
        request: DraftOpen | DraftAdvance = wire.unwrap(message)
        return request
