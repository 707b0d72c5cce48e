"""Minimum cost of a round: bare gRPC round trips, with a model's work between them.

Every round goes to the draft service and to the verify service. Here two servers of grpc.aio on
uvloop, like ours, answer with the requested number of bytes after matrix products over as many
bytes as a model of the bundled pair reads, or for the requested time: a process that a model has
just evicted from the processor's caches wakes up slowly, and that is part of the cost. Nothing is
parsed, judged or kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import struct
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import grpc
import numpy as np
import uvloop

from flyspec import rpc

_METHOD = "/flyspec.bench.Echo/Echo"
_ASKED = struct.Struct("<QQ")  # requested ns of work, bytes of the answer
_ANSWERED = struct.Struct("<Q")  # ns of work done
_NUM_WEIGHTS = 14
_WEIGHT_SHAPE = (512, 2048)  # 14 of them in float32: 56 MiB, more than a core's caches
_ROWS = 16


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
        yield Echoes([await stack.enter_async_context(_echo()) for _ in range(count)])


@contextlib.asynccontextmanager
async def _echo() -> Any:
    """Open a stream to an echo server in its own process."""
    async with process(__spec__.name) as channel:
        call: Any = channel.stream_stream(_METHOD)()
        yield call
        await call.done_writing()


@contextlib.asynccontextmanager
async def process(module: str, *arguments: str) -> AsyncIterator[Any]:
    """Open a channel to a server in its own process, running a module that calls `listen`."""
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, stdout=asyncio.subprocess.PIPE,
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


async def listen(handler: grpc.GenericRpcHandler) -> None:
    """Serve on a free port, and print it."""
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


class Products:
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
        self._work = Products()

    def service(self, handler_call_details: Any) -> Any:
        async def echo(_: Any, context: Any) -> None:
            while (message := await context.read()) is not grpc.aio.EOF:
                work_ns, size = _ASKED.unpack_from(message)
                worked = self._work.last(work_ns) if work_ns else self._work.once()
                await context.write(_ANSWERED.pack(worked).ljust(size, b"x"))

        return grpc.stream_stream_rpc_method_handler(echo)


if __name__ == "__main__":
    uvloop.run(listen(_Echo()))
