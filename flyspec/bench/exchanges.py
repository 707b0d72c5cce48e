"""A round's two exchanges with nothing decided: the cost of threads, values and time limits.

As `transport`'s echoes, but with flyspec's own messages, which every end turns into values and
back; the work is done in a thread, so that the event loop stays free, and every wait has a time
limit: everything a service does apart from drafts and rules.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import uvloop

from flyspec import rpc, wire
from flyspec.bench.transport import Leg, Products, listen, process
from flyspec.prefix import TokenSequence
from flyspec.v1 import draft_pb2, verify_pb2
from flyspec.values.rounds import (
    Decision,
    DraftAdvance,
    DraftChunk,
    DraftTimings,
    Outcome,
    Verdict,
    VerifyRound,
    VerifyTimings,
)
from flyspec.values.tokens import Origin

_METHOD = "/flyspec.bench.Exchange/{}"
_LIMIT_S = 60.0
_LENGTH, _NUM_DRAFTS = 400, 15
_MESSAGES: dict[str, tuple[Any, Any]] = {
    "draft": (draft_pb2.DraftRequest, draft_pb2.DraftResponse),
    "verify": (verify_pb2.VerifyRequest, verify_pb2.VerifyResponse),
}


class Exchanges:
    """Streams to a draft and a verify service that work for the requested time."""

    def __init__(self, draft: Any, verify: Any) -> None:
        self._draft, self._verify = draft, verify
        self._sequence = TokenSequence(range(_LENGTH))

    async def outside_ns(self, legs: Sequence[Leg]) -> int:
        """Get a proposal, then a verdict on it; return their time outside the work, in ns."""
        begin = time.perf_counter_ns()
        draft, verify = legs
        advance = DraftAdvance(draft.work_ns, _LENGTH - 1, [_LENGTH], _NUM_DRAFTS)
        proposal = wire.decode(DraftChunk, await _ask(self._draft, wire.encode(advance)))
        round_ = VerifyRound(
            verify.work_ns, _LENGTH - 1, [_LENGTH], proposal.token_ids, self._sequence.hash
        )
        answer = await _ask(self._verify, wire.encode(round_))
        verdict = wire.decode(Verdict, answer, start_length=_LENGTH)
        worked = proposal.timings.model_ns + verdict.timings.forward_ns
        return time.perf_counter_ns() - begin - worked


async def _ask(call: Any, message: Any) -> Any:
    async with asyncio.timeout(_LIMIT_S):
        await call.write(message)
    async with asyncio.timeout(_LIMIT_S):
        return await rpc.unbroken(call.read())


@contextlib.asynccontextmanager
async def exchanges() -> AsyncIterator[Exchanges]:
    """The two services, each in a process of its own."""
    async with contextlib.AsyncExitStack() as stack:
        calls = []
        for kind, (request, response) in _MESSAGES.items():
            channel = await stack.enter_async_context(process(__spec__.name, kind))
            method = channel.stream_stream(
                _METHOD.format(kind), request.SerializeToString, response.FromString
            )
            calls.append(method())
        yield Exchanges(*calls)


class _Service(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers each message after as many ns of work as its `round_id`."""

    def __init__(self, kind: str) -> None:
        self._kind, self._work = kind, Products()
        self._inbox: queue.SimpleQueue[tuple[int, asyncio.Future[int]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def service(self, handler_call_details: Any) -> Any:
        async def answer(_: Any, context: Any) -> None:
            while (message := await rpc.read(context, _LIMIT_S)) is not None:
                request = wire.unwrap(message)
                worked: asyncio.Future[int] = asyncio.get_running_loop().create_future()
                self._inbox.put((request.round_id, worked))
                reply = _reply(request, await worked)
                await rpc.write(context, wire.encode(reply), _LIMIT_S)

        request, response = _MESSAGES[self._kind]
        return grpc.stream_stream_rpc_method_handler(
            answer, request.FromString, response.SerializeToString
        )

    def _run(self) -> None:
        while True:
            work_ns, worked = self._inbox.get()
            took = self._work.last(work_ns)
            worked.get_loop().call_soon_threadsafe(worked.set_result, took)


def _reply(request: DraftAdvance | VerifyRound, worked: int) -> DraftChunk | Verdict:
    length = request.keep_length + len(request.append_token_ids)
    if isinstance(request, DraftAdvance):
        return DraftChunk(
            request.round_id,
            request.keep_length,
            request.append_token_ids[-1],
            length,
            range(request.max_tokens),
            [Origin.EXACT_MODEL] * request.max_tokens,
            timings=DraftTimings(model_ns=worked, service_ns=worked),
            confidences=[0.9] * request.max_tokens,
        )
    decisions = tuple(Decision(Outcome.EXACT, token) for token in request.draft_token_ids)
    return Verdict(
        length + len(decisions),
        0,
        decisions,
        start_length=length,
        round_id=request.round_id,
        timings=VerifyTimings(forward_ns=worked, service_ns=worked),
    )


if __name__ == "__main__":
    uvloop.run(listen(_Service(sys.argv[1])))
