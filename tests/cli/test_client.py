"""The client against a real stack of tiny models."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from flyspec.cli.service import Child
from flyspec.cli.stack import Stack
from flyspec.client import (
    AdminClient,
    AsyncClient,
    Chat,
    Chunk,
    Client,
    Completion,
    GenerateOptions,
    SpeculationMetrics,
    Started,
)
from flyspec.errors import (
    ConfigError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    UnimplementedError,
)
from flyspec.rules import Rule
from flyspec.rules.presets import DEFAULT_RULE
from flyspec.speculation_length import MOST_BY_AUTO
from flyspec.values.tokens import Origin, SamplingParams
from tests.waiting import idle

LONG = GenerateOptions(max_tokens=200, ignore_eos=True, num_speculative_tokens=2)
SHORT = GenerateOptions(max_tokens=6)


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(stack.address, max_retries=0) as opened:
        yield opened


async def test_events_come_in_order_and_add_up(client: AsyncClient) -> None:
    events = [event async for event in client.generate("the cat", SHORT)]
    started, *chunks, completion = events
    assert isinstance(started, Started)
    assert isinstance(completion, Completion)
    assert started.rule.name == DEFAULT_RULE
    assert started.rule.fly_window_size is not None
    assert (started.num_speculative_tokens, started.adaptive) == (MOST_BY_AUTO, True)
    tokens = 0
    for chunk in chunks:
        assert isinstance(chunk, Chunk)
        assert len(chunk.token_ids) == len(chunk.origins) == len(chunk.token_texts)
        assert "".join(chunk.token_texts) == chunk.text
        tokens += len(chunk.token_ids)
    assert tokens == completion.completion_tokens
    assert completion.prompt_tokens == len(started.prompt_token_ids)
    assert completion.timings.total_ns > 0


async def test_three_forms_of_a_prompt(client: AsyncClient) -> None:
    text = await client.complete("the cat", SHORT)
    ids = await client.complete(text.started.prompt_token_ids, SHORT)
    assert ids.token_ids == text.token_ids
    chat = await client.complete(Chat.of_user("the cat"), SHORT)
    assert len(chat.started.prompt_token_ids) > len(text.started.prompt_token_ids)


async def test_options_reach_the_server(client: AsyncClient) -> None:
    options = GenerateOptions(
        sampling=SamplingParams(1.0, 0.9, 50),
        seed=7,
        max_tokens=5,
        drafter="prompt_lookup",
        rule=Rule("fly-paper", fly_window_size=2),
        num_speculative_tokens=4,
    )
    first, second = (
        await client.complete("the cat", options),
        await client.complete("the cat", options),
    )
    assert first.token_ids == second.token_ids
    assert first.started.seed == 7
    assert first.started.drafter == "prompt_lookup"
    assert first.started.num_speculative_tokens == 4
    assert (first.started.rule.name, first.started.rule.fly_window_size) == ("fly-paper", 2)
    plain = await client.complete(
        "the cat", GenerateOptions(max_tokens=3, num_speculative_tokens=0)
    )
    assert set(plain.origins) == {Origin.PLAIN}
    assert plain.started.drafter == ""
    assert plain.mean_accepted_tokens == 1.0


async def test_closing_the_iterator_cancels_the_request(stack: Stack, client: AsyncClient) -> None:
    for _ in range(5):
        async with aclosing(client.generate("the cat", LONG)) as events:
            async for event in events:
                if isinstance(event, Chunk):
                    break
    async with AdminClient(stack.admin_address) as admin:
        assert await idle(admin)
        assert (await admin.status()).ready


async def test_models_drafters_and_health(stack: Stack, client: AsyncClient) -> None:
    models = await client.list_models()
    assert models.target.name == Path(stack.options.model).name
    assert models.rules[0] == DEFAULT_RULE
    assert await client.check_health() == "SERVING"
    async with AdminClient(stack.admin_address) as admin:
        drafters = await admin.list_drafters()
        assert await admin.check_health() == "SERVING"
    assert [d.name for d in drafters] == list(models.drafters)
    assert [d.active for d in drafters] == [True, *[False] * (len(drafters) - 1)]


async def test_errors_are_those_of_the_server(client: AsyncClient) -> None:
    with pytest.raises(InvalidArgumentError, match="text is empty"):
        await client.complete("")
    with pytest.raises(InvalidArgumentError, match="no token ids"):
        await client.complete([])
    with pytest.raises(InvalidArgumentError, match="token id 400 is out of range"):
        await client.complete([400])
    with pytest.raises(NotFoundError, match="no drafter 'x'"):
        await client.complete("a", GenerateOptions(drafter="x"))
    with pytest.raises(InvalidArgumentError, match=r"prompt\[0\] must be an integer between 0 and"):
        await client.complete([-1])
    with pytest.raises(InvalidArgumentError, match="max_tokens: must be an integer or None"):
        await client.complete("a", GenerateOptions(max_tokens=1.5))  # type: ignore[arg-type]
    with pytest.raises(NotFoundError):
        await client.check_health("no.such.Service")


@pytest.mark.parametrize("cls", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"address": 5}, "address: must be HOST:PORT, got 5"),
        ({"address": ""}, "address: must be HOST:PORT, got ''"),
        ({"address": "http://127.0.0.1:38759"}, r"HOST:PORT of the generation port .*, not a URL"),
        ({"client_id": "a\nb"}, "client_id: must be printable ASCII"),
        ({"max_retries": "2"}, "max_retries: must be an integer >= 0, got '2'"),
        ({"credentials": "fsk_secret"}, r"credentials: must be Credentials or None, got a str$"),
    ],
)
def test_what_a_client_cannot_be_made_of(
    cls: type[Client | AsyncClient], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        cls(**arguments)
    assert cls("dns:///localhost:50050").address == "dns:///localhost:50050"


async def test_a_host_without_an_address() -> None:
    async with AsyncClient("no-such-host.invalid:1", max_retries=0) as client:
        with pytest.raises(UnavailableError, match=r"no server at no-such-host\.invalid:1; start"):
            await client.complete("x")


async def test_no_server() -> None:
    async with (
        AsyncClient("127.0.0.1:1", max_retries=0) as client,
        AdminClient("127.0.0.1:1") as admin,
    ):
        with pytest.raises(UnavailableError, match=r"no server at 127\.0\.0\.1:1; .* address$"):
            await client.complete("x")
        admin.hint = "pass --admin-address"  # as a command does
        with pytest.raises(UnavailableError, match=r"or pass --admin-address$"):
            await admin.status()


async def test_a_port_without_the_admin_service(stack: Stack) -> None:
    async with AdminClient(stack.address) as admin:
        with pytest.raises(UnimplementedError, match=r"AdminService is at its --admin-port, \d+"):
            await admin.status()


async def test_a_server_that_does_not_answer() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with AsyncClient(f"127.0.0.1:{port}", max_retries=0) as client:
            with pytest.raises(UnavailableError, match="did not answer in time"):
                await client.check_health(timeout_s=0.3)


async def test_losing_the_server_in_mid_stream(stack: Stack) -> None:
    services = [
        "--verify-address",
        stack.options.verify_address,
        "--draft-address",
        stack.options.draft_address,
    ]
    flags = [*services, "--port", "0", "--admin-port", "0", "--metrics-port", "-1"]
    server = await Child.start("orchestrator", "orchestrator", flags, 1, lambda _: None)
    await server.ready()
    async with AsyncClient(f"127.0.0.1:{server.facts['port']}", max_retries=0) as client:
        events = client.generate("the cat", LONG)
        await anext(events)
        server.send(signal.SIGKILL)
        with pytest.raises(UnavailableError, match="lost the server at 127"):
            async for _ in events:
                pass
    await server.ended()


def test_metrics_without_drafts() -> None:
    assert SpeculationMetrics(num_rounds=3).mean_acceptance_length == 1.0
    assert SpeculationMetrics(num_rounds=3).draft_acceptance_rate == 0.0
