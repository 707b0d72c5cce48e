"""Both protocols against a stack: the same tokens, the same errors, nothing left behind; TLS."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import gevent
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flyspec.client import AdminClient, AsyncClient, Chat, Credentials, GenerateOptions
from flyspec.errors import (
    ConfigError,
    DeadlineExceededError,
    FlyspecError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from flyspec.rules import Rule
from flyspec.values.tokens import SamplingParams
from loadtest.protocols import TRANSPORTS, connect
from loadtest.sampler import left_open
from tests.loadtest.conftest import address_of
from tests.observability.scraping import scrape
from tests.security.authority import Authority, credentials, files
from tests.security.ports import listening
from tests.waiting import idle, until

pytestmark = pytest.mark.slow
CHAT = Chat.of_user("Mia has 12 stamps and buys 30 more. How many has she now?")
EXACT = GenerateOptions(max_tokens=24, rule=Rule("exact"), num_speculative_tokens=4, seed=3)
LONG = GenerateOptions(max_tokens=1500, ignore_eos=True, num_speculative_tokens=0)


async def using(address, protocol, work):
    """What `work` does with a transport, in a thread whose greenlets it may use."""

    def run():
        transport = TRANSPORTS[protocol]([address], Credentials())
        try:
            return work(transport)
        finally:
            transport.close()
            gevent.get_hub().destroy(destroy_loop=True)

    return await asyncio.to_thread(run)


@pytest.fixture
def ask(load_stack, protocol):
    """Work with a transport to the stack."""
    return partial(using, address_of(load_stack, protocol), protocol)


async def nothing_left(stack):
    async with AdminClient(stack.admin_address) as admin:
        assert await idle(admin)
    port = stack.services["orchestrator"].facts["metrics_port"]

    async def answered():
        return not (await asyncio.to_thread(scrape, port)).total("flyspec_http_open_requests")

    assert await until(answered)


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        (CHAT, EXACT),
        ("def fibonacci(n):", EXACT),
        ([5, 6, 7, 8], EXACT),
        ("def f", replace(EXACT, sampling=SamplingParams(0.8, 0.9))),
        (CHAT, replace(EXACT, ignore_eos=True)),
        ("x = [1, 2", GenerateOptions(max_tokens=30, rule=Rule("fly", fly_window_size=2),
                                      num_speculative_tokens=6, drafter="prompt_lookup")),
    ],
)  # fmt: skip
async def test_tokens_are_those_of_the_client(load_stack, ask, prompt, options):
    *pieces, end = await ask(lambda transport: list(transport.stream(prompt, options)))
    tokens = [token for piece in pieces for token in piece]
    async with AsyncClient(load_stack.address) as client:
        expected = await client.complete(prompt, options)
    assert tokens == expected.token_ids
    rounds = expected.completion.speculation.num_rounds
    assert (end.tokens, end.rounds) == (len(tokens), rounds)


async def test_the_target(load_stack, ask):
    found = await ask(lambda transport: transport.target())
    async with AsyncClient(load_stack.address) as client:
        expected = (await client.list_models()).target
    assert (found.name, found.context_length) == (expected.name, expected.context_length)


async def test_a_stream_that_is_given_up_leaves_nothing(load_stack, ask):
    def give_up(transport):
        for pieces in (1, 1, 2, 3) * 3:
            stream = transport.stream(CHAT, LONG)
            for _ in range(pieces):
                next(stream)
            stream.close()

    await ask(give_up)
    await nothing_left(load_stack)


async def test_requests_without_room_are_refused_with_a_time_to_retry(load_stack, ask):
    def refused(transport):
        with pytest.raises(ResourceExhaustedError) as raised:
            list(transport.stream(CHAT, LONG))
        return raised.value.retry_after_s

    async with (
        AsyncClient(load_stack.address) as client,
        AdminClient(load_stack.admin_address) as admin,
    ):

        async def is_full():
            counts = left_open(await admin.status())
            return (counts["generations"], counts["waiting"]) == (6, 2)

        filling = [asyncio.create_task(client.complete(CHAT, LONG)) for _ in range(8)]
        try:
            assert await until(is_full)
            assert await ask(refused) > 0
        finally:
            for task in filling:
                task.cancel()
            await asyncio.gather(*filling, return_exceptions=True)
    await nothing_left(load_stack)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"drafter": "nobody"}, NotFoundError),
        ({"sampling": SamplingParams(-1.0)}, InvalidArgumentError),
        ({"timeout_s": 0.05}, DeadlineExceededError),
    ],
)
async def test_errors_are_of_the_same_kinds(load_stack, ask, changes, error):
    options = GenerateOptions(max_tokens=1500, ignore_eos=True, **changes)
    with pytest.raises(FlyspecError) as raised:
        await ask(lambda transport: list(transport.stream(CHAT, options)))
    assert raised.value.status == error.status
    await nothing_left(load_stack)


@pytest.mark.parametrize("protocol", TRANSPORTS)
async def test_nobody_there(protocol):
    def both(transport):
        with pytest.raises(UnavailableError):
            transport.target()
        with pytest.raises(UnavailableError):
            list(transport.stream(CHAT, EXACT))

    await using("127.0.0.1:1", protocol, both)


# --- gRPC connections -------------------------------------------------------------------------


async def health(address, credentials):
    """Ask, in a thread."""

    def ask():
        with connect(address, credentials) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            return stub.Check(request, timeout=5.0).status

    return await asyncio.to_thread(ask)


async def test_grpc_tls_with_and_without_a_certificate(tmp_path):
    ours = Authority(tmp_path, "ours")
    async with listening(files(ours.server("service"), ours)) as address:
        known = credentials(ours, ours.pair("load"))
        assert await health(address, known) == health_pb2.HealthCheckResponse.SERVING
        for refused in (credentials(ours), Credentials()):
            with pytest.raises(grpc.RpcError):
                await health(address, refused)


def test_a_key_goes_not_in_the_clear():
    with pytest.raises(ConfigError, match="unencrypted"):
        connect("10.0.0.1:1", Credentials(api_key="secret"))
