"""Calls without permission, and request IDs of calls, on one of our servers."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from flyspec import rpc
from flyspec.errors import UnauthenticatedError
from flyspec.interceptors import Interceptor
from flyspec.telemetry import Telemetry, request_id
from tests.observability.scraping import settled


def refuse_strangers(method, context):
    if not any(key == "friend" for key, _ in context.invocation_metadata()):
        raise UnauthenticatedError("who are you?")


@pytest.fixture
async def server():
    telemetry = Telemetry("draft")
    opened = rpc.GrpcServer(
        "127.0.0.1", 0, [], [], interceptors=telemetry.interceptors(), checks=[refuse_strangers]
    )
    port = await opened.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel, lambda: settled(telemetry.registry)
    await opened.stop(0)


async def reflect(channel, metadata=()):
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = stub.ServerReflectionInfo(iter([request]), metadata=metadata)
    return [answer async for answer in call]


async def test_calls_are_counted_by_method_and_status(server):
    channel, scrape = server
    health = health_pb2_grpc.HealthStub(channel)
    await health.Check(health_pb2.HealthCheckRequest())
    with pytest.raises(grpc.aio.AioRpcError):
        await health.Check(health_pb2.HealthCheckRequest(service="none"))
    assert len(await reflect(channel, (("friend", "1"),))) == 1
    found = await scrape()
    calls = "flyspec_rpc_calls_total"
    assert found.total(calls, method="grpc.health.v1.Health/Check", code="OK") == 1
    assert found.total(calls, method="grpc.health.v1.Health/Check", code="NOT_FOUND") == 1
    assert found.total(calls, code="OK") == 2
    assert found.total("flyspec_rpc_open_calls") == 0


async def test_who_may_not_call_is_counted_and_logged(server, caplog):
    channel, scrape = server
    caplog.set_level("INFO")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reflect(channel)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert (await scrape()).total("flyspec_rpc_calls_total", code="UNAUTHENTICATED") == 1
    (line,) = [r for r in caplog.records if r.message == "call ended with an error"]
    assert line.fields["method"].endswith("ServerReflectionInfo")
    assert line.fields["client"].startswith("ipv4:127.0.0.1:")
    assert (line.fields["code"], line.fields["reason"]) == ("UNAUTHENTICATED", "who are you?")


async def test_what_cannot_be_read_is_counted_and_logged(server, caplog):
    channel, scrape = server
    caplog.set_level("INFO")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary("/grpc.health.v1.Health/Check")(b"\xff\xff\xff")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await scrape()).total("flyspec_rpc_calls_total", code="INVALID_ARGUMENT") == 1
    (line,) = [r for r in caplog.records if r.message == "call ended with an error"]
    assert line.fields["code"] == "INVALID_ARGUMENT"


async def test_an_answer_that_outlives_its_call_is_counted_as_cancelled():
    """Asked for its peer after the call, gRPC's context would end the process."""
    telemetry, answers = Telemetry("draft"), []

    async def flood(request, context):
        while True:
            yield bytes(1 << 20)

    class Kept(Interceptor):
        """Keeps answers, so that they end when they are forgotten, after their calls."""

        def around_method(self, found, details):
            async def answer(request, context):
                answers.append(found.unary_stream(request, context))
                async for part in answers[-1]:
                    yield part

            return grpc.unary_stream_rpc_method_handler(answer)

    handler = grpc.unary_stream_rpc_method_handler(flood)
    server = grpc.aio.server(interceptors=[Kept(), *telemetry.interceptors()])
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("test.Test", {"Flood": handler})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_stream("/test.Test/Flood")(b"")
        await asyncio.sleep(0.3)  # nobody reads: the answer waits for room to write
        call.cancel()
        await asyncio.sleep(0.3)
    await server.stop(0)
    for answer in answers:
        await answer.aclose()
    assert answers
    found = await settled(telemetry.registry)
    assert found.total("flyspec_rpc_calls_total", code="CANCELLED") == 1


async def test_methods_that_clients_make_up_are_not_counted(server):
    channel, scrape = server
    for method in ("/evil/Method", "/flyspec.v1.DraftService/" + "x" * 1000):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(method)(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "evil" not in str((await scrape()).values_of("method"))
    assert (await scrape()).total("flyspec_rpc_calls_total") == 0


def test_outside_of_a_call_there_is_no_id():
    assert request_id() == ""
