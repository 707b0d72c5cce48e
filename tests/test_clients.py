"""The Python clients: blocking and not, in any thread and event loop; keywords, retries, errors."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import get_type_hints

import pytest

import flyspec
from flyspec.client import (
    AdminClient,
    AsyncClient,
    Chat,
    Chunk,
    Client,
    Completion,
    GenerateOptions,
    Started,
)
from flyspec.client import requests as client_requests
from flyspec.client.requests import GenerateKeywords, Retries, options_of, prompt_of
from flyspec.errors import (
    ConfigError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
    UnimplementedError,
)
from flyspec.rules import Rule
from flyspec.rules.presets import DEFAULT_RULE
from flyspec.speculation_length import MOST_BY_AUTO
from flyspec.values.tokens import Origin, SamplingParams
from tests.orchestrator.stacks import start_stack
from tests.waiting import idle

SHORT = GenerateOptions(max_tokens=6, rule=Rule("exact"))


@pytest.fixture(scope="module")
def ports(model_dirs):
    """The addresses of a stack in a thread of its own, so that tests may block."""
    loop, started, end = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    found = {}

    async def run():
        async with start_stack(model_dirs, http_port=0) as running:
            found["generation"], found["admin"] = running.client.address, running.admin.address
            found["http"] = f"127.0.0.1:{running.http_port}"
            started.set()
            await end.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    started.wait()
    yield found
    loop.call_soon_threadsafe(end.set)
    thread.join()


@pytest.fixture(scope="module")
def stack(ports):
    """The address of its generation port."""
    return ports["generation"]


@pytest.fixture
async def client(stack):
    async with AsyncClient(stack, max_retries=0) as opened:
        yield opened


@pytest.fixture
async def admin(ports):
    async with AdminClient(ports["admin"]) as opened:
        yield opened


def test_the_package_offers_both():
    assert flyspec.Client is Client
    assert flyspec.AsyncClient is AsyncClient
    with pytest.raises(AttributeError, match="no attribute 'Clients'"):
        flyspec.Clients  # noqa: B018
    code = "import flyspec, sys; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_both_have_the_same_methods():
    blocking, not_blocking = (
        {
            name: inspect.signature(method).replace(return_annotation="").parameters
            for name, method in inspect.getmembers(cls, callable)
            if name == "__init__" or not name.startswith("_")
        }
        for cls in (Client, AsyncClient)
    )
    assert blocking == not_blocking
    assert blocking.keys() > {"generate", "complete", "score", "list_models", "check_health"}


def test_blocking(stack):
    with Client(stack) as client:
        started, *chunks, completion = client.generate("the cat", rule="exact", max_tokens=6)
        assert isinstance(started, Started)
        assert isinstance(completion, Completion)
        text = "".join(chunk.text for chunk in chunks if isinstance(chunk, Chunk))
        whole = client.complete("the cat", SHORT)
        assert text == whole.text
        assert whole.token_ids == client.complete("the cat", SHORT, max_tokens=9).token_ids[:6]
        assert client.list_models().target.name == "target"
        assert client.check_health() == client.check_health("flyspec.v1.GenerationService")
        pieces = list(client.score("the cat", logprobs=1))
        assert sum(len(piece.logprobs) for piece in pieces) == (
            len(whole.started.prompt_token_ids) - 1
        )


async def test_events_come_in_order_and_add_up(client):
    options = GenerateOptions(max_tokens=6)
    started, *chunks, completion = [event async for event in client.generate("the cat", options)]
    assert started.rule.name == DEFAULT_RULE
    assert started.rule.fly_window_size is not None
    assert (started.num_speculative_tokens, started.adaptive) == (MOST_BY_AUTO, True)
    for chunk in chunks:
        assert len(chunk.token_ids) == len(chunk.origins) == len(chunk.token_texts)
        assert "".join(chunk.token_texts) == chunk.text
    assert sum(len(chunk.token_ids) for chunk in chunks) == completion.completion_tokens
    assert completion.prompt_tokens == len(started.prompt_token_ids)
    assert completion.timings.total_ns > 0


async def test_three_forms_of_a_prompt(client):
    text = await client.complete("the cat", SHORT)
    ids = await client.complete(text.started.prompt_token_ids, SHORT)
    assert ids.token_ids == text.token_ids
    chat = await client.complete(Chat.of_user("the cat"), SHORT)
    assert len(chat.started.prompt_token_ids) > len(text.started.prompt_token_ids)


async def test_options_reach_the_server(client):
    given = {
        "sampling": SamplingParams(1.0, 0.9, 50), "seed": 7, "max_tokens": 5,
        "drafter": "prompt_lookup", "rule": Rule("fly-paper", fly_window_size=2),
        "num_speculative_tokens": 4,
    }  # fmt: skip
    first, second = [await client.complete("the cat", GenerateOptions(**given)) for _ in range(2)]
    assert first.token_ids == second.token_ids
    for name in ("seed", "drafter", "num_speculative_tokens"):
        assert getattr(first.started, name) == given[name]
    assert (first.started.rule.name, first.started.rule.fly_window_size) == ("fly-paper", 2)
    plain = await client.complete("the cat", SHORT, num_speculative_tokens=0)
    assert set(plain.origins) == {Origin.PLAIN}
    assert plain.started.drafter == ""
    assert plain.mean_accepted_tokens == 1.0


async def test_models_drafters_and_health(client, admin):
    models = await client.list_models()
    assert models.rules[0] == DEFAULT_RULE
    assert await client.check_health() == await admin.check_health() == "SERVING"
    drafters = await admin.list_drafters()
    assert [d.name for d in drafters] == list(models.drafters)
    assert [d.active for d in drafters] == [True, *[False] * (len(drafters) - 1)]


async def test_leaving_a_loop_early_cancels(stack, client, admin):
    with Client(stack) as blocking:
        for event in blocking.generate("the cat", ignore_eos=True):
            if isinstance(event, Chunk):
                break
        assert blocking.complete("the cat", SHORT).token_ids
    async with aclosing(client.generate("the cat", ignore_eos=True)) as events:
        async for event in events:
            if isinstance(event, Chunk):
                break
    assert await idle(admin)


def test_several_threads_share_a_client(stack):
    with Client(stack) as client, ThreadPoolExecutor(8) as pool:
        texts = set(pool.map(lambda _: client.complete("the cat", SHORT).text, range(24)))
    assert len(texts) == 1


async def test_blocking_beside_a_running_event_loop(stack):
    """As in a notebook, whose cells run inside one."""
    with Client(stack) as client:
        assert client.complete("the cat", SHORT).token_ids


def test_several_event_loops_share_a_client(stack):
    client = AsyncClient(stack)

    async def ask():
        return (await client.complete("the cat", SHORT)).text

    async def ask_and_close():
        text = await ask()
        await client.close()
        return text

    texts = {asyncio.run(ask()) for _ in range(3)} | {asyncio.run(ask_and_close())}
    with ThreadPoolExecutor(2) as pool:
        texts |= set(pool.map(lambda _: asyncio.run(ask_and_close()), range(4)))
    assert len(texts) == 1


def test_keywords_are_all_options_and_no_others():
    expected = {
        field.name
        for cls in (GenerateOptions, SamplingParams)
        for field in dataclasses.fields(cls)
        if field.name != "sampling"
    }
    assert GenerateKeywords.__annotations__.keys() == expected
    options = get_type_hints(GenerateOptions)
    keywords = get_type_hints(GenerateKeywords)
    different = {n for n in expected & options.keys() if keywords[n] != options[n]}
    assert different == {"rule", "stop"}  # these take more


def test_keywords_in_their_places():
    base = GenerateOptions(max_tokens=5, sampling=SamplingParams(top_p=0.5))
    keywords = {
        "rule": "margin", "stop": "x", "temperature": 0.7, "logit_bias": {3: 1.0, 1: 2.0},
        "prediction": "y", "timeout_s": 2.0,
    }  # fmt: skip
    assert options_of(base, keywords) == GenerateOptions(
        max_tokens=5, rule=Rule("margin"), stop=("x",), prediction="y", timeout_s=2.0,
        sampling=SamplingParams(top_p=0.5, temperature=0.7, logit_bias=((1, 2.0), (3, 1.0))),
    )  # fmt: skip
    assert options_of(GenerateOptions(rule="exact", stop="x"), {}) == GenerateOptions(
        rule=Rule("exact"), stop=("x",)
    )
    messages = [{"role": "user", "content": "x"}]
    assert prompt_of(messages) == Chat(messages)
    with pytest.raises(InvalidArgumentError, match=r"there is no such option; did you mean temp"):
        options_of(None, {"temprature": 1.0})


async def asked(client, method, *prompt, **keywords):
    found = getattr(client, method)(*prompt, **keywords)
    if inspect.isasyncgen(found):
        return [piece async for piece in found]
    return await found if inspect.isawaitable(found) else list(found)


async def refused(make, error, message, *prompt, method="complete", **keywords):
    """Both clients raise an error for a request."""
    for kind in (Client, AsyncClient):
        client = make(kind)
        with pytest.raises(error, match=message):
            await asked(client, method, *prompt, **keywords)
        await client.close() if kind is AsyncClient else client.close()


@pytest.mark.parametrize(
    ("prompt", "keywords", "error", "message"),
    [
        ("", {}, InvalidArgumentError, "text is empty"),
        ([], {}, InvalidArgumentError, "no token ids"),
        ([400], {}, InvalidArgumentError, "token id 400 is out of range"),
        ("x", {"rule": "nope"}, InvalidArgumentError, "rule.name must be one of exact, fly"),
        ("x", {"drafter": "nope"}, NotFoundError, "no drafter 'nope'"),
        ("x", {"max_tokens": -1}, InvalidArgumentError, "max_tokens must be an integer between 1"),
        ("x", {"timeout_s": 0}, InvalidArgumentError, "timeout_s must be more than 0"),
        ("x", {"timeout_s": 1e-3}, DeadlineExceededError, "within 0.001 s; allow more time|deadl"),
        ("x", {"patience_s": "5"}, InvalidArgumentError, "patience_s: must be a number, got '5'"),
        ("x", {"options": 5}, InvalidArgumentError, "options: must be GenerateOptions, got 5"),
    ],
)
async def test_errors_say_what_to_change(stack, prompt, keywords, error, message):
    await refused(lambda kind: kind(stack), error, message, prompt, **{"max_tokens": 4, **keywords})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"prompt": [-1]}, InvalidArgumentError, r"prompt\[0\] must be an integer between 0 and"),
        ({"prompt": 5}, InvalidArgumentError, "prompt: must be a text, token ids or the messages"),
        ({"logprobs": -1}, InvalidArgumentError, "logprobs must be an integer between 0 and 20"),
        ({"timeout_s": "5"}, InvalidArgumentError, "timeout_s must be more than 0"),
        ({"timeout_s": 5e-4}, DeadlineExceededError, "within 0.0005 s; allow more time|deadline"),
    ],
)
async def test_errors_of_scores(stack, arguments, error, message):
    arguments = {"prompt": "the cat", **arguments}
    await refused(lambda kind: kind(stack), error, message, method="score", **arguments)


async def test_other_ports_and_services(ports, client):
    generation = ports["generation"].rpartition(":")[2]
    for port, error, message in (
        ("http", UnavailableError,
         "does not speak gRPC; if this is the HTTP port, the generation.* is another "
         r"\(default 50050\)"),
        ("admin", UnimplementedError, "the admin port of an orchestrator; GenerationService is at "
         f"its --port, {generation} here; give another address"),
    ):  # fmt: skip
        await refused(lambda kind, p=port: kind(ports[p], max_retries=0), error, message, "x")
    async with AdminClient(ports["generation"]) as wrong:
        with pytest.raises(UnimplementedError, match=r"AdminService is at its --admin-port, \d+"):
            await wrong.status()
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
def test_what_a_client_cannot_be_made_of(cls, arguments, message):
    with pytest.raises(ConfigError, match=message):
        cls(**arguments)
    assert cls("dns:///localhost:50050").address == "dns:///localhost:50050"


async def test_a_missing_server(monkeypatch):
    monkeypatch.setattr(client_requests, "FIRST_REST_S", 0.01)
    message = (
        r"no server at 127.0.0.1:1; start one with `flyspec serve`, wait until it says that it is "
        r"ready, or give another address$"
    )
    await refused(lambda kind: kind("127.0.0.1:1"), UnavailableError, message, "x")
    async with AdminClient("127.0.0.1:1") as admin:
        admin.hint = "pass --admin-address"  # as a command does
        with pytest.raises(UnavailableError, match=r"or pass --admin-address$"):
            await admin.status()
    async with AsyncClient("no-such-host.invalid:1", max_retries=0) as client:
        with pytest.raises(UnavailableError, match=r"no server at no-such-host\.invalid:1; start"):
            await client.complete("x")


async def test_a_server_that_does_not_answer():
    async def silent(reader, writer):
        await reader.read()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with AsyncClient(f"127.0.0.1:{port}", max_retries=0) as client:
            with pytest.raises(UnavailableError, match="did not answer in time"):
                await client.check_health(timeout_s=0.3)


def test_the_key_in_the_environment(monkeypatch):
    monkeypatch.setenv("FLYSPEC_API_KEY", "fsk_secret")
    assert ("authorization", "Bearer fsk_secret") in Client("127.0.0.1:1")._metadata
    assert ("authorization", "Bearer fsk_secret") in AsyncClient("127.0.0.1:1")._metadata


def test_retries():
    retries = Retries(2)
    assert [retries.rest_s(UnavailableError("x")) for _ in range(2)] == [0.5, 1.0]
    with pytest.raises(UnavailableError):
        retries.rest_s(UnavailableError("x"))
    assert Retries(1).rest_s(ResourceExhaustedError("x", 3.0)) == 3.0
    for error in (
        ResourceExhaustedError("x", 61.0), ResourceExhaustedError("x"), InvalidArgumentError("x"),
    ):  # fmt: skip
        with pytest.raises(type(error)):
            Retries(5).rest_s(error)
    patient = Retries(0, patience_s=1000.0)
    assert [patient.rest_s(ResourceExhaustedError("x", 90.0)) for _ in range(5)] == [90.0] * 5
    with pytest.raises(UnavailableError):
        patient.rest_s(UnavailableError("x"))
