"""The `DraftService` servicer: protobuf in, protobuf out, one stream one session."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any

from draft_service.sessions import Session, Sessions
from flyspec import rpc, wire
from flyspec.errors import InvalidArgumentError
from flyspec.types import DraftAdvance, DraftOpen
from flyspec.v1 import draft_pb2, draft_pb2_grpc


class DraftService(draft_pb2_grpc.DraftServiceServicer):
    """Answers `Describe` and `Draft` for a set of sessions."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    @rpc.handler
    async def Describe(
        self, request: draft_pb2.DraftServiceDescribeRequest, context: Any
    ) -> draft_pb2.DraftServiceDescribeResponse:
        """What this service drafts with, and how busy it is."""
        return wire.draft_info_to_proto(self._sessions.describe())

    @rpc.handler
    async def Draft(self, requests: Any, context: Any) -> None:
        """A session: one `open`, then any number of `advance`, one proposal each."""
        first = await self._read(context)
        if first is None:
            return
        if not isinstance(first, DraftOpen):
            raise InvalidArgumentError("DraftRequest.request: the first message must be open")
        with self._sessions.open(first) as session:
            while (request := await self._read(context)) is not None:
                await self._propose(session, request, context)

    async def _propose(
        self, session: Session, request: DraftOpen | DraftAdvance, context: Any
    ) -> None:
        """Answer one `advance`, chunk by chunk."""
        arrival_ns = perf_counter_ns()
        if not isinstance(request, DraftAdvance):
            raise InvalidArgumentError(
                "DraftRequest.request: open may only come first; "
                "use another stream for another session"
            )
        session.advance(request, arrival_ns)
        last = False
        while not last:
            chunk = await session.next_chunk()
            response = wire.draft_chunk_to_proto(chunk)
            last = chunk.last
            if last:
                response.service_ns = perf_counter_ns() - arrival_ns
            await context.write(response)

    async def _read(self, context: Any) -> DraftOpen | DraftAdvance | None:
        """The client's next message, None at the end. Raises `IdleTimeoutError`."""
        message = await rpc.read(context, self._sessions.limits.idle_timeout_s)
        return None if message is None else wire.draft_request_from_proto(message)
