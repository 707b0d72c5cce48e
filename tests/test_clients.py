"""The Python clients: blocking and not, in any thread and event loop; keywords, retries, errors."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_type_hints

import pytest

import flyspec
from flyspec.client import AsyncClient, Chat, Chunk, Client, Completion, GenerateOptions, Started
from flyspec.client import requests as client_requests
from flyspec.client.requests import GenerateKeywords, Retries, options_of, prompt_of
from flyspec.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
    UnimplementedError,
)
from flyspec.rules import Rule
from flyspec.values.tokens import SamplingParams
from tests.orchestrator.stacks import start_stack

ROOT = Path(flyspec.__file__).parent.parent
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


def test_leaving_a_loop_early_cancels(stack):
    with Client(stack) as client:
        for event in client.generate("the cat", ignore_eos=True):
            if isinstance(event, Chunk):
                break
        assert client.complete("the cat", SHORT).token_ids


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
    with pytest.raises(InvalidArgumentError, match=r"there is no such option; did you mean temp"):
        options_of(None, {"temprature": 1.0})


def test_prompts_in_every_form(stack):
    messages = [{"role": "user", "content": "x"}]
    assert prompt_of(messages) == Chat(messages)
    for prompt in ("x", [1, 2], [], Chat(messages)):
        assert prompt_of(prompt) is prompt


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"rule": "nope"}, InvalidArgumentError, "rule.name must be one of exact, fly"),
        ({"drafter": "nope"}, NotFoundError, "nope"),
        ({"max_tokens": -1}, InvalidArgumentError, "max_tokens must be an integer between 1"),
        ({"timeout_s": 0}, InvalidArgumentError, "timeout_s must be more than 0"),
        ({"timeout_s": 1e-3}, DeadlineExceededError, "within 0.001 s; allow more time|deadline"),
        ({"patience_s": "5"}, InvalidArgumentError, "patience_s: must be a number, got '5'"),
        ({"options": 5}, InvalidArgumentError, "options: must be GenerateOptions, got 5"),
    ],
)
async def test_errors_say_what_to_change(stack, keywords, error, message):
    with Client(stack) as client, pytest.raises(error, match=message):
        client.complete("the cat", **{"max_tokens": 4, **keywords})
    async with AsyncClient(stack) as client:
        with pytest.raises(error, match=message):
            await client.complete("the cat", **{"max_tokens": 4, **keywords})


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
    with Client(stack) as client, pytest.raises(error, match=message):
        list(client.score(**{"prompt": "the cat", **arguments}))
    async with AsyncClient(stack) as client:
        with pytest.raises(error, match=message):
            [piece async for piece in client.score(**{"prompt": "the cat", **arguments})]


@pytest.mark.parametrize(
    ("port", "error", "message"),
    [
        ("http", UnavailableError, "does not speak gRPC; if this is the HTTP port, the generation"),
        (
            "admin",
            UnimplementedError,
            "the admin port of an orchestrator; GenerationService",
        ),
    ],
)
async def test_a_port_of_another_kind(ports, port, error, message):
    if port == "http":
        message += r".* is another \(default 50050\)"
    else:
        number = ports["generation"].rpartition(":")[2]
        message += rf" is at its --port, {number} here; give another address"
    with Client(ports[port], max_retries=0) as client, pytest.raises(error, match=message):
        client.complete("x")
    async with AsyncClient(ports[port], max_retries=0) as client:
        with pytest.raises(error, match=message):
            await client.complete("x")


async def test_a_missing_server(monkeypatch):
    monkeypatch.setattr(client_requests, "FIRST_REST_S", 0.01)
    message = (
        r"no server at 127.0.0.1:1; start one with `flyspec serve`, wait until it says that it is "
        r"ready, or give another address$"
    )
    with Client("127.0.0.1:1") as client, pytest.raises(UnavailableError, match=message):
        client.complete("x")
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(UnavailableError, match=message):
            await client.complete("x")


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


TYPED = """
from flyspec import AsyncClient, Client
from flyspec.client import Chunk

def ask(client: Client) -> str:
    for event in client.generate([{"role": "user", "content": "hi"}], rule="fly", max_tokens=4):
        if isinstance(event, Chunk):
            print(event.text, event.origins)
    return client.complete("x", temperature=0.5).text

async def ask_too(client: AsyncClient) -> str:
    async for event in client.generate("x", stop=["a"]):
        print(event)
    return (await client.complete([1, 2])).text
"""


def test_a_users_file_is_typed(tmp_path):
    """What mypy says of flyspec itself does not count: installed packages are silent."""
    file = tmp_path / "used.py"
    for text, said in ((TYPED, []), (TYPED.replace("0.5", "'hot'"), ["temperature"])):
        file.write_text(text)
        command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", file.name]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, check=False,
            env={**os.environ, "MYPYPATH": str(ROOT)},
        )  # fmt: skip
        errors = [line for line in done.stdout.splitlines() if line.startswith(file.name)]
        assert len(errors) == len(said), errors
        assert all(word in line for word, line in zip(said, errors, strict=True))
