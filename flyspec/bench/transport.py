"""What a round costs at least: two bare gRPC round trips, with a model's work between them.

Every round goes to the draft service and to the verify service. Here two servers of grpc.aio on
uvloop, as ours are, answer with what they were sent, after matrix products over as many bytes as a
model of the bundled pair reads: a process that a model has just driven from the processor's caches
wakes slowly, and that is part of the cost. Nothing is parsed, judged or kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import time
from typing import Any

import grpc
import uvloop

from flyspec import rpc

_METHOD = "/flyspec.bench.Echo/Echo"
_MESSAGE = b"x" * 120
"""About as long as a round of 15 drafts."""
_NUM_WEIGHTS = 14
_WEIGHT_SHAPE = (512, 2048)  # 14 of them in float32: 56 MiB, more than a core's caches
_ROWS = 16


async def round_trips_ns(rounds: int = 120) -> int:
    """Median time of a round's two round trips outside the servers' work, ns."""
    times = []
    async with contextlib.AsyncExitStack() as stack:
        calls = [await stack.enter_async_context(_echo()) for _ in range(2)]
        for _ in range(rounds):
            begin, worked = time.perf_counter_ns(), 0
            for call in calls:
                await call.write(_MESSAGE)
                worked += int.from_bytes((await call.read())[:8], "big")
            times.append(time.perf_counter_ns() - begin - worked)
    return int(statistics.median(times[rounds // 10 :]))


@contextlib.asynccontextmanager
async def _echo() -> Any:
    """A stream to an echo server in a process of its own."""
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "flyspec.bench.transport", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert server.stdout is not None
        port = int(await server.stdout.readline())
        async with rpc.connect(f"127.0.0.1:{port}") as channel:
            call: Any = channel.stream_stream(_METHOD)()
            yield call
            await call.done_writing()
    finally:
        server.kill()
        await server.wait()


class _Echo(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers each message with the nanoseconds that its work took, and the message's length."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        self._weights = [torch.randn(_WEIGHT_SHAPE) for _ in range(_NUM_WEIGHTS)]
        self._rows = torch.randn(_ROWS, _WEIGHT_SHAPE[0])

    def service(self, handler_call_details: Any) -> Any:
        async def echo(_: Any, context: Any) -> None:
            while (message := await context.read()) is not grpc.aio.EOF:
                await context.write(self._work().to_bytes(8, "big").ljust(len(message), b"x"))

        return grpc.stream_stream_rpc_method_handler(echo)

    def _work(self) -> int:
        begin = time.perf_counter_ns()
        for weight in self._weights:
            (self._rows @ weight) @ weight.T
        return time.perf_counter_ns() - begin


async def _serve() -> None:
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    server.add_generic_rpc_handlers((_Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(_serve())
