"""Clients that do not read: their generations wait, then end, and nothing accumulates."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from flyspec import rpc
from flyspec.client import GenerateOptions
from flyspec.rules import Rule
from flyspec.v1 import generation_pb2, generation_pb2_grpc
from orchestrator.front.grpc import GenerationServicer, write
from tests.orchestrator.scripted import Taker, scripted
from tests.orchestrator.stacks import start_stack

MESSAGE = generation_pb2.GenerateResponse(
    chunk=generation_pb2.GenerationChunk(text="x" * 10_000, token_ids=[1])
)
WINDOW_BYTES = 4096
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", WINDOW_BYTES)]


class Endless(generation_pb2_grpc.GenerationServiceServicer):
    """Writes as fast as the client reads; counts the messages read and the calls that ended."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.written = self.ended = 0

    @rpc.handler
    async def Generate(self, request, context) -> None:
        try:
            while True:
                await write(context, MESSAGE, self.timeout_s)
                self.written += 1
        finally:
            self.ended += 1


async def read_rest(call, sizes: list[int]) -> None:
    """Read to the end; raise if it ends with an error."""
    while (message := await call.read()) is not grpc.aio.EOF:
        sizes.append(message.ByteSize())


@pytest.fixture
async def endless():
    servicer = Endless(0.3)
    add = generation_pb2_grpc.add_GenerationServiceServicer_to_server
    server = rpc.GrpcServer("127.0.0.1", 0, [(add, servicer)], ["flyspec.v1.GenerationService"])
    servicer.port = await server.start()
    yield servicer
    await server.stop(0)


async def test_a_reader_that_is_only_slow_gets_everything(endless):
    endless.timeout_s = 1.0
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{endless.port}", options=SMALL_WINDOW
    ) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.Generate(generation_pb2.GenerateRequest())
        for _ in range(40):
            assert (await call.read()) == MESSAGE
            await asyncio.sleep(0.03)  # more than its time in all
        call.cancel()


async def test_a_client_that_reads_nothing_loses_its_slot(model_dirs):
    async with start_stack(model_dirs, max_concurrent=1, write_timeout_s=2.0) as stack:
        port, _ = stack.orchestrator.ports
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=SMALL_WINDOW) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            request = generation_pb2.GenerateRequest(
                text="the cat", ignore_eos=True, logprobs=20, return_rounds=True
            )
            call = stub.Generate(request)
            assert (await call.read()).HasField("started")
            status = await stack.admin.status()
            assert status.active_generations == 1
            options = GenerateOptions(max_tokens=4, rule=Rule("exact"))
            assert (await stack.client.complete("a dog", options, 60.0)).token_ids
            assert await stack.idle()
            sizes: list[int] = []
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_rest(call, sizes)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert sum(sizes) < 2 * WINDOW_BYTES  # it did not run ahead of its reader


async def takes_nothing() -> None:
    await asyncio.Event().wait()


async def cannot_be_written() -> None:
    raise ValueError("cannot be written")


async def has_gone() -> None:
    raise grpc.aio.InternalError("the call is over")


@pytest.mark.parametrize(
    ("take", "left_s", "status", "details"),
    [
        (takes_nothing, 0.2, "DEADLINE_EXCEEDED", "the request's deadline passed"),
        (takes_nothing, None, "DEADLINE_EXCEEDED", "the client read nothing for 0.4 s"),
        (cannot_be_written, None, "INTERNAL", "cannot be written"),
        (has_gone, None, "CANCELLED", ""),
    ],
)
async def test_what_ends_a_write_is_what_the_request_is_counted_by(take, left_s, status, details):
    async with scripted() as inside:
        request = generation_pb2.GenerateRequest()
        request.token_ids.ids.extend([5, 6, 7])
        context = Taker(take, left_s)
        with pytest.raises((grpc.aio.AbortError, asyncio.CancelledError)):
            await GenerationServicer(inside.generations, 0.4).Generate(request, context)
        assert details in context.details
        assert bool(details) == (context.code is not None and context.code.name == status)
        (counted,) = inside.observer.metrics.requests.collect()
        ends = {s.labels["status"] for s in counted.samples if s.value and "_total" in s.name}
        assert ends == {status}
        assert not any(inside.left)
