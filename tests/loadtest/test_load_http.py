"""What load tests send over HTTP and make of the answers, without a model."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from flyspec.client import Chat, Credentials, GenerateOptions, Models
from flyspec.errors import (
    FlyspecError,
    ResourceExhaustedError,
    UnavailableError,
)
from flyspec.rules import Rule
from flyspec.security import PortSecurity, TlsFiles
from flyspec.speculation_length import AUTO
from flyspec.values.admin import ModelInfo
from flyspec.values.tokens import SamplingParams
from loadtest.protocols import BY_CODE, HttpTransport, request_of, target_of
from orchestrator.front.http.bodies import ChatBody, CompletionBody
from orchestrator.front.http.chat import chat_options
from orchestrator.front.http.completions import completion_options, prompts_of
from orchestrator.front.http.options import chat_of
from orchestrator.front.http.server import HttpServer
from tests.loadtest.test_load_transports import using
from tests.security.authority import Authority, credentials, files

MODELS = Models(ModelInfo("target", "", 300, 4096), ("model",), ("fly", "exact"))
CHAT = Chat([{"role": "user", "content": "hi"}])
OPTIONS = GenerateOptions(
    sampling=SamplingParams(0.7, 0.9),
    seed=11,
    max_tokens=20,
    ignore_eos=True,
    drafter="model",
    rule=Rule("fly", fly_entropy_threshold=0.4, guarded_token_ids=(1, 2)),
    num_speculative_tokens=7,
)


# --- requests ---------------------------------------------------------------------------------


def test_the_server_reads_the_options_that_were_given():
    path, sent = request_of(CHAT, OPTIONS)
    body = ChatBody(**json.loads(sent))
    assert path == "/v1/chat/completions"
    assert chat_options(body, MODELS) == OPTIONS
    assert chat_of(body, joins_parts=False) == CHAT


@pytest.mark.parametrize("prompt", ["text", (5, 6, 7)])
def test_so_it_does_for_completions(prompt):
    options = replace(OPTIONS, num_speculative_tokens=AUTO)
    path, sent = request_of(prompt, options)
    body = CompletionBody(**json.loads(sent))
    assert path == "/v1/completions"
    assert completion_options(body, MODELS) == options
    assert prompts_of(body) == {"prompt": prompt}


# --- answers ----------------------------------------------------------------------------------


@asynccontextmanager
async def answering(*events, code=200, headers=(), tls=None):
    """The address of a server that answers everything with this, and the requests' headers."""
    seen = []

    async def app(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        seen.append({k.decode(): v.decode() for k, v in scope["headers"]})
        await send({"type": "http.response.start", "status": code, "headers": [*headers]})
        for event in events:
            if event is None:
                raise RuntimeError
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    server = HttpServer(app, [0], PortSecurity("127.0.0.1", tls or TlsFiles()))
    port = await server.start()
    try:
        yield f"127.0.0.1:{port}", seen
    finally:
        await server.stop(0.0)


def event(**document):
    return b"data: " + json.dumps(document).encode() + b"\n\n"


async def error_of(*events, **more):
    """What a stream with this answer raises."""

    def failed(transport):
        with pytest.raises(FlyspecError) as raised:
            list(transport.stream("text", OPTIONS_OF_TEXT))
        return raised.value

    async with answering(*events, **more) as (address, _):
        return await using(address, "http", failed)


OPTIONS_OF_TEXT = GenerateOptions(max_tokens=4)


@pytest.mark.parametrize("code", [*BY_CODE, "unknown_one", None])
async def test_a_refusal_is_the_error_of_its_code(code):
    body = json.dumps({"error": {"message": "so and so", "code": code}}).encode()
    error = await error_of(body, code=429 if code == "resource_exhausted" else 400)
    assert type(error) is BY_CODE.get(code, FlyspecError)
    assert "so and so" in str(error)


@pytest.mark.parametrize(
    ("value", "seconds"), [(b"2", 2.0), (b"Wed, 21 Oct 2026 07:28:00 GMT", None), (None, None)]
)
async def test_the_time_to_retry_is_in_seconds(value, seconds):
    headers = [(b"retry-after", value)] if value else []
    error = await error_of(b"<html>busy</html>", code=429, headers=headers)
    assert isinstance(error, ResourceExhaustedError)
    assert (str(error), error.retry_after_s) == ("<html>busy</html>", seconds)


@pytest.mark.parametrize(
    ("events", "kind", "message"),
    [
        ([event(error={"type": "server_error", "message": "gone"})], FlyspecError, "gone"),
        ([event(error={"code": "unavailable", "message": "gone"})], UnavailableError, "gone"),
        ([event(choices=[]), b"data: [DONE]\n\n"], UnavailableError, "without a completion"),
        ([event(choices=[]), None], UnavailableError, "ncomplete"),
        ([b"data: {\n\n"], FlyspecError, "not a JSON object"),
    ],
)  # fmt: skip
async def test_a_stream_that_breaks_off(events, kind, message):
    error = await error_of(*events)
    assert type(error) is kind
    assert message in str(error)


@pytest.mark.parametrize("body", [b"[]", b"{}", b'{"data": []}', b'{"data": [1]}', b"x"])
def test_a_list_of_models_that_is_none(body):
    with pytest.raises(FlyspecError):
        target_of(body)


# --- TLS --------------------------------------------------------------------------------------


async def listed(address, credentials):
    def ask():
        transport = HttpTransport([address], credentials)
        try:
            return transport.target().name
        finally:
            transport.close()

    return await asyncio.to_thread(ask)


async def test_tls_with_and_without_a_certificate(tmp_path):
    ours, others = Authority(tmp_path, "ours"), Authority(tmp_path, "others")
    body = json.dumps({"data": [{"id": "target"}]}).encode()
    async with answering(body, tls=files(ours.server("service"), ours)) as (address, seen):
        known = credentials(ours, ours.pair("load"))
        for where in (address, f"https://{address}"):
            assert await listed(where, replace(known, api_key="key")) == "target"
        assert seen[0]["authorization"] == "Bearer key"
        for refused in (credentials(ours), credentials(others, ours.pair("load")),
                        replace(known, ssl_target_name="other.example")):  # fmt: skip
            with pytest.raises(UnavailableError):
                await listed(address, refused)
        assert len(seen) == 2


async def test_a_wrong_key():
    async with answering(b"", code=401) as (address, _):
        with pytest.raises(FlyspecError, match="no message"):
            await listed(address, Credentials())
