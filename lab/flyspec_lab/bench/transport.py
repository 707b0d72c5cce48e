"""Minimum cost of a round: gRPC round trips, with a model's work between them.

Every round goes to the draft service and to the verify service. Here two servers of grpc.aio on
uvloop, like ours, answer after matrix products over as many bytes as a model of the bundled pair
reads, or for the requested time: a process that a model has just evicted from the processor's
caches wakes up slowly, and that is part of the cost.

Echoes are bare: nothing is parsed, judged or kept. Exchanges are a round with nothing decided: with
flyspec's own messages, which every end turns into values and back, work in a thread, so that the
event loop stays free, and a time limit on every wait: everything a service does apart from drafts
and rules.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import statistics
import struct
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import grpc
import numpy as np
import uvloop

from flyspec import rpc, wire
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

_ECHO = "/flyspec.bench.Echo/Echo"
_ASKED = struct.Struct("<QQ")  # requested ns of work, bytes of the answer
_ANSWERED = struct.Struct("<Q")  # ns of work done
_NUM_WEIGHTS = 14
_WEIGHT_SHAPE = (512, 2048)  # 14 of them in float32: 56 MiB, more than a core's caches
_ROWS = 16


_EXCHANGE = "/flyspec.bench.Exchange/{}"
_LIMIT_S = 60.0
_LENGTH, _NUM_DRAFTS = 400, 15
_MESSAGES: dict[str, tuple[Any, Any]] = {
    "draft": (draft_pb2.DraftRequest, draft_pb2.DraftResponse),
    "verify": (verify_pb2.VerifyRequest, verify_pb2.VerifyResponse),
}


class Leg(NamedTuple):
    """One round trip: bytes of the message (at least 16) and the answer (at least 8), ns of work.

    `work_ns` 0 means one pass over all weights.
    """

    request_bytes: int = 120
    response_bytes: int = 120
    work_ns: int = 0


async def round_trips_ns(rounds: int = 120) -> int:
    """Return the median time of a round's two round trips outside the work, in ns."""
    async with echoes(2) as ways:
        times = [await ways.outside_ns((Leg(), Leg())) for _ in range(rounds)]
    return int(statistics.median(times[rounds // 10 :]))


class Echoes:
    """Streams to echo servers."""

    def __init__(self, calls: Sequence[Any]) -> None:
        self._calls = calls

    async def outside_ns(self, legs: Sequence[Leg]) -> int:
        """Make one round trip per server; return their time outside the work, in ns."""
        begin, worked = time.perf_counter_ns(), 0
        for call, leg in zip(self._calls, legs, strict=True):
            asked = _ASKED.pack(leg.work_ns, leg.response_bytes)
            await call.write(asked.ljust(leg.request_bytes, b"x"))
            worked += _ANSWERED.unpack_from(await call.read())[0]
        return time.perf_counter_ns() - begin - worked


@contextlib.asynccontextmanager
async def echoes(count: int) -> AsyncIterator[Echoes]:
    """Start `count` echo servers, each in its own process."""
    async with contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(_process("echo")) for _ in range(count)]
        yield Echoes([channel.stream_stream(_ECHO)() for channel in channels])


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
            channel = await stack.enter_async_context(_process(kind))
            method = channel.stream_stream(
                _EXCHANGE.format(kind), request.SerializeToString, response.FromString
            )
            calls.append(method())
        yield Exchanges(*calls)


@contextlib.asynccontextmanager
async def _process(kind: str) -> AsyncIterator[Any]:
    """Open a channel to a server of this kind in its own process."""
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __spec__.name, kind, stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert server.stdout is not None
        port = int(await server.stdout.readline())
        async with rpc.connect(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        server.kill()
        await server.wait()


# --- in the other processes -------------------------------------------------------------------


async def _listen(handler: grpc.GenericRpcHandler) -> None:
    """Serve on a free port, and print it."""
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


class _Products:
    """Matrix products over as many bytes as a model of the bundled pair reads."""

    def __init__(self) -> None:
        numbers = np.random.default_rng(0)

        def matrix(shape: tuple[int, int]) -> np.ndarray[Any, np.dtype[np.float32]]:
            return numbers.standard_normal(shape, np.float32)

        self._weights = [matrix(_WEIGHT_SHAPE) for _ in range(_NUM_WEIGHTS)]
        self._rows = matrix((_ROWS, _WEIGHT_SHAPE[0]))

    def once(self) -> int:
        """Make one pass over all weights; return the ns it took."""
        begin = time.perf_counter_ns()
        for weight in self._weights:
            (self._rows @ weight) @ weight.T
        return time.perf_counter_ns() - begin

    def last(self, work_ns: int) -> int:
        """Read weights, one after the other, for `work_ns`; return the ns it took."""
        begin, index = time.perf_counter_ns(), 0
        while (worked := time.perf_counter_ns() - begin) < work_ns:
            self._rows[:1] @ self._weights[index % _NUM_WEIGHTS]
            index += 1
        return worked


class _Echo(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers each message with the ns of work done, padded to the requested bytes."""

    def __init__(self) -> None:
        self._work = _Products()

    def service(self, handler_call_details: Any) -> Any:
        async def echo(_: Any, context: Any) -> None:
            while (message := await context.read()) is not grpc.aio.EOF:
                work_ns, size = _ASKED.unpack_from(message)
                worked = self._work.last(work_ns) if work_ns else self._work.once()
                await context.write(_ANSWERED.pack(worked).ljust(size, b"x"))

        return grpc.stream_stream_rpc_method_handler(echo)


class _Service(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers each message after as many ns of work as its `round_id`."""

    def __init__(self, kind: str) -> None:
        self._kind, self._work = kind, _Products()
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
    kind = sys.argv[1]
    uvloop.run(_listen(_Echo() if kind == "echo" else _Service(kind)))
