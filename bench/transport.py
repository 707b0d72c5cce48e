"""What a round costs at least: a bare gRPC stream's round trip between two processes.

Every round makes two of them, to the draft service and to the verify service. The echo server does
nothing else, speaks grpc.aio on uvloop as our services do, and rests between two messages, as they
do while a model works: waking up is part of the cost.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from typing import Any

import grpc

from flyspec import rpc

_METHOD = "/flyspec.bench.Echo/Echo"
_MESSAGE = b"x" * 120
"""About as long as a round of 15 drafts."""


async def round_trip_ns(messages: int = 200, pause_s: float = 0.006) -> int:
    """Median time from writing a message to having read the echo, ns."""
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.transport", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert server.stdout is not None
        port = int(await server.stdout.readline())
        times = []
        async with rpc.connect(f"127.0.0.1:{port}") as channel:
            call: Any = channel.stream_stream(_METHOD)()
            for _ in range(messages):
                await asyncio.sleep(pause_s)
                begin = time.perf_counter_ns()
                await call.write(_MESSAGE)
                await call.read()
                times.append(time.perf_counter_ns() - begin)
            await call.done_writing()
    finally:
        server.kill()
        await server.wait()
    return int(statistics.median(times[messages // 10 :]))


class _Echo(grpc.GenericRpcHandler):  # type: ignore[misc]
    def service(self, handler_call_details: Any) -> Any:
        async def echo(_: Any, context: Any) -> None:
            while (message := await context.read()) is not grpc.aio.EOF:
                await context.write(message)

        return grpc.stream_stream_rpc_method_handler(echo)


async def _serve() -> None:
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    server.add_generic_rpc_handlers((_Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    rpc.run(_serve())
