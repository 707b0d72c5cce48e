"""Statuses become errors again; those that grpc.aio makes up are not attributed to the peer."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from contextlib import aclosing

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flyspec import rpc
from flyspec.errors import (
    FlyspecError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from flyspec.rpc import channel, server, sizes
from flyspec.v1 import generation_pb2
from loadtest.proxy import Proxy
from tests.waiting import until

Code = grpc.StatusCode


@pytest.mark.parametrize(
    ("code", "details", "kind", "message"),
    [
        (Code.INVALID_ARGUMENT, "seed: no", InvalidArgumentError, "seed: no"),
        (Code.UNAVAILABLE, "gone", UnavailableError, "gone"),
        # A write that met a stream which had just ended: another try may mend it.
        (Code.INTERNAL, "Internal error from Core", UnavailableError, "the stream ended"),
        # A bug of the peer: another try will not.
        (Code.INTERNAL, "internal error in Verify", FlyspecError, "INTERNAL: internal error in"),
        (Code.DATA_LOSS, "x", FlyspecError, "DATA_LOSS: x"),
        (Code.CANCELLED, "CANCELLED", UnavailableError, "the server cancelled the call"),
    ],
)
def test_statuses_become_errors(code, details, kind, message):
    error = rpc.error_of_status(code, details)
    assert type(error) is kind
    assert message in str(error)


class Refusing(grpc.GenericRpcHandler):
    """Refuses every call with a given error."""

    def __init__(self, error: Exception, metadata=()) -> None:
        self.error, self.metadata = error, metadata

    def service(self, _):
        return grpc.unary_unary_rpc_method_handler(self._refuse)

    @rpc.handler
    async def _refuse(self, request, context):
        if self.metadata:
            code = grpc.StatusCode[self.error.status]
            await context.abort(code, str(self.error), trailing_metadata=self.metadata)
        raise self.error


async def told(error: Exception, metadata=()) -> FlyspecError:
    """The error that a client raises for a server's."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Refusing(error, metadata),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with rpc.connect(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/x/y")(b"")
    await server.stop(0)
    assert rpc.was_said(caught.value) is not bool(metadata)
    return rpc.error_of(caught.value)


@pytest.mark.parametrize("seconds", [None, 0.0, 0.125, 3.0, 86_400.0])
async def test_when_to_retry_reaches_the_client(seconds):
    error = await told(ResourceExhaustedError("all slots are taken", seconds))
    assert isinstance(error, ResourceExhaustedError)
    assert error.retry_after_s == seconds
    when = "" if seconds is None else f"; retry in {seconds:.3g} s"
    assert str(error) == f"all slots are taken{when}"


@pytest.mark.parametrize("character", ["x", "é", "数", "😀"])
async def test_long_messages_fit_into_a_status_with_details(character):
    error = await told(ResourceExhaustedError(character * 5000, 1.0))
    assert isinstance(error, ResourceExhaustedError)
    assert error.retry_after_s == 1.0
    assert str(error).startswith(character * 100)
    assert str(error).endswith("retry in 1 s")


@pytest.mark.parametrize("value", [b"", b"nonsense", b"\x08\x05\x12\x03abc"])
async def test_details_that_say_nothing_are_passed_over(value):
    error = ResourceExhaustedError("full")
    found = await told(error, (("grpc-status-details-bin", value),))
    assert isinstance(found, ResourceExhaustedError)
    assert found.retry_after_s is None


async def test_who_is_cancelled_leaves_the_read_to_its_end(caplog: pytest.LogCaptureFixture):
    """Cancelling a read itself would leak its message's memory in grpc.aio."""
    gc.collect()  # what tests before have left is not told of here
    caplog.clear()
    for failure in (None, ValueError("the call ended")):
        arrived, ended = asyncio.Event(), []

        async def reading(arrived=arrived, ended=ended, failure=failure):
            await arrived.wait()
            ended.append(True)
            if failure:
                raise failure
            return "message"

        waiting = asyncio.create_task(rpc.unbroken(reading()))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not ended
        arrived.set()
        await until(lambda ended=ended: ended)
        gc.collect()
    assert not caplog.records
    assert await rpc.unbroken(asyncio.sleep(0, "message")) == "message"


@pytest.mark.parametrize("answered_at_once", [True, False])
async def test_the_next_request_ends_the_answer_to_the_one_before(answered_at_once: bool):
    """But no other's: news of it that comes late, when its own answer is under way, is none."""
    asked = iter(["first", "second", None])
    second_is_here = asyncio.get_running_loop().create_future()
    interrupted = []

    async def read():
        request = next(asked)
        if request == "second":
            second_is_here.set_result(None)  # heard of before asyncio tells that the read is done
        return request

    requests = rpc.read_ahead(read, 5, lambda: interrupted.append(answered))
    async with aclosing(requests):
        async for request in requests:
            answered = request
            if request == "first":
                await second_is_here
            if request == "second" or not answered_at_once:
                await asyncio.sleep(0.01)
    assert answered == "second"
    assert interrupted == ([] if answered_at_once else ["first"])


async def test_calls_that_wait_for_a_busy_server_are_not_cancelled():
    """gRPC cancels calls beyond 1,000 that a server has not taken up yet, unless told otherwise."""
    server = rpc.GrpcServer("127.0.0.1", 0, [], [], max_streams=1000)
    port = await server.start()
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.insecure_channel(f"127.0.0.1:{port}", options=options) for _ in range(3)]
    checks = [health_pb2_grpc.HealthStub(channel).Check for channel in channels]
    calls = [check.future(health_pb2.HealthCheckRequest()) for check in checks for _ in range(800)]
    time.sleep(1.5)  # noqa: ASYNC251 the server's loop takes none up meanwhile
    try:
        codes = await asyncio.to_thread(lambda: Counter(call.code() for call in calls))
    finally:
        for channel in channels:
            channel.close()
        await server.stop(0)
    assert codes == {Code.OK: 2400}


async def test_a_forgotten_connection_ends_on_both_sides(monkeypatch):
    """gRPC waits for a minute for the answer to a ping, unless told otherwise."""
    quick = [(name, value // 50) for name, value in channel.KEEPALIVE]
    monkeypatch.setattr(server, "SERVER_OPTIONS", [*quick, *server.SERVER_OPTIONS])
    monkeypatch.setattr(channel, "CHANNEL_OPTIONS", [*quick, *channel.CHANNEL_OPTIONS])
    running = rpc.GrpcServer("127.0.0.1", 0, [], [])
    proxy = Proxy("127.0.0.1", port := await running.start())
    await proxy.start()

    def served():
        found = psutil.Process().net_connections("tcp")
        return [c for c in found if c.laddr.port == port and c.status == psutil.CONN_ESTABLISHED]

    try:
        async with rpc.connect(proxy.address) as connection:
            watch = health_pb2_grpc.HealthStub(connection).Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            assert served()
            proxy.forget()
            async with asyncio.timeout(30):
                with pytest.raises(grpc.aio.AioRpcError):
                    await watch.read()
            assert await until(lambda: not served())
    finally:
        await proxy.close()
        await running.stop(0)


def test_parts_of_a_message_are_counted_up_to_where_it_can_be_parsed(monkeypatch):
    kind = generation_pb2.GenerateRequest
    request = kind(text="x", stop=["a", "b"], stop_token_ids=[1, 2, 3], sampling={"min_p": 0.5})
    request.speculation.phases.add(until=["c", ""], until_token_ids=[4, 5])
    request.speculation.phases.add().rule.guarded_token_ids.append(3)
    request.sampling.logit_bias[3] = 1.5
    data, count = request.SerializeToString(), 17
    for whole in (data, data + b"\xff", data + b"\x0a\x7f"):  # the parser also gets that far
        monkeypatch.setattr(sizes, "MAX_PARTS", count + 1)
        sizes.check_parts(whole, kind.DESCRIPTOR)
        monkeypatch.setattr(sizes, "MAX_PARTS", count - 1)
        with pytest.raises(InvalidArgumentError, match=f"more than {count - 1} fields"):
            sizes.check_parts(whole, kind.DESCRIPTOR)
