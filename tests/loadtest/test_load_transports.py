"""Both protocols against a stack: the same tokens, the same errors, and nothing left behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import gevent
import pytest

from flyspec.client import AdminClient, AsyncClient, Chat, Credentials, GenerateOptions
from flyspec.errors import (
    DeadlineExceededError,
    FlyspecError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from flyspec.rules import Rule
from flyspec.values.tokens import SamplingParams
from loadtest.admin import Admin, left_open
from loadtest.connection import Endpoint
from loadtest.options import ConnectionFlags
from loadtest.users.protocols import TRANSPORTS
from tests.loadtest.conftest import address_of
from tests.observability.scraping import scrape
from tests.waiting import idle, until

CHAT = Chat.of_user("Mia has 12 stamps and buys 30 more. How many has she now?")
EXACT = GenerateOptions(max_tokens=24, rule=Rule("exact"), num_speculative_tokens=4, seed=3)
LONG = GenerateOptions(max_tokens=1500, ignore_eos=True, num_speculative_tokens=0)


async def using(address, protocol, work, connections=None):
    """What `work` does with a transport, in a thread whose greenlets it may use."""

    def run():
        endpoints = ConnectionFlags(protocol).endpoints(address, Credentials())
        transport = TRANSPORTS[protocol](endpoints, connections)
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
        (CHAT, replace(EXACT, ignore_eos=True, logprobs=2)),
        ("x = [1, 2", GenerateOptions(max_tokens=30, rule=Rule("fly", fly_window_size=2),
                                      num_speculative_tokens=6, drafter="prompt_lookup")),
    ],
)  # fmt: skip
async def test_tokens_are_those_of_the_client(load_stack, ask, prompt, options):
    *pieces, end = await ask(lambda transport: list(transport.open(prompt, options)))
    tokens = [token for piece in pieces for token in piece]
    async with AsyncClient(load_stack.address) as client:
        expected = await client.complete(prompt, options)
    assert tokens == expected.token_ids
    rounds = expected.completion.speculation.num_rounds
    assert (end.tokens, end.rounds, [*end.recoveries]) == (len(tokens), rounds, [])


async def test_the_models(load_stack, protocol, ask):
    found = await ask(lambda transport: transport.list_models())
    async with AsyncClient(load_stack.address) as client:
        expected = await client.list_models()
    assert found.target.name == expected.target.name
    assert found.target.context_length == expected.target.context_length
    assert set(found.rules) == set(expected.rules)
    assert bool(found.drafters) == (protocol == "grpc")


async def test_a_stream_that_is_given_up_leaves_nothing(load_stack, ask):
    def give_up(transport):
        said = []
        for pieces in (0, 0, 1, 2, 3) * 3:
            stream = transport.open(CHAT, LONG)
            reading = iter(stream)
            for _ in range(pieces):
                next(reading)
            stream.cancel()
            stream.cancel()
            with pytest.raises(FlyspecError) as raised:
                list(reading)
            said.append(type(raised.value))
        return set(said)

    assert await ask(give_up) == {UnavailableError}
    await nothing_left(load_stack)


async def test_what_runs_at_the_end_is_given_up(load_stack, ask):
    await ask(lambda transport: [next(iter(transport.open(CHAT, LONG))) for _ in range(3)])
    await nothing_left(load_stack)


async def test_requests_without_room_are_refused_with_a_time_to_retry(load_stack, ask):
    def fill(transport):
        admin = Admin(Endpoint(load_stack.admin_address))
        opened = [transport.open(CHAT, LONG) for _ in range(8)]
        try:
            while [*left_open(admin.status()).values()][2:] != [6, 2]:  # running, waiting
                gevent.sleep(0.01)
            with pytest.raises(ResourceExhaustedError) as refused:
                list(transport.open(CHAT, LONG))
        finally:
            admin.close()
            for stream in opened:
                stream.cancel()
        return refused.value.retry_after_s

    assert await ask(fill) > 0
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
        await ask(lambda transport: list(transport.open(CHAT, options)))
    assert raised.value.status == error.status
    await nothing_left(load_stack)


async def test_requests_share_one_connection(ask):
    def two(transport):
        streams = [transport.open(CHAT, EXACT) for _ in range(2)]
        return [list(stream)[-1].tokens for stream in streams]

    first, second = await ask(two, connections=1)
    assert first == second > 0


async def test_nobody_there(protocol):
    def both(transport):
        with pytest.raises(FlyspecError, match=r"127\.0\.0\.1:1 does not answer"):
            transport.list_models()
        with pytest.raises(UnavailableError):
            list(transport.open(CHAT, EXACT))

    await using("127.0.0.1:1", protocol, both)
