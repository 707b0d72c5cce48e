"""Who may use the HTTP port: API keys, certificates, other origins' pages."""

from __future__ import annotations

import asyncio
import socket
import ssl

import httpx2
import openai
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from flyspec.config import OrchestratorSettings
from flyspec.errors import ConfigError
from orchestrator.front.http.face import make_server
from tests.observability.scraping import parse
from tests.orchestrator.stacks import start_stack
from tests.security.authority import Authority, replace_files

SAID = [{"role": "user", "content": "hi"}]
ASKED = {"messages": SAID, "max_tokens": 2}
CHAT = "/v1/chat/completions"


def base(stack) -> str:
    return f"http://127.0.0.1:{stack.http_port}"


@pytest.mark.parametrize(
    ("authorization", "code", "kind", "message"),
    [
        (None, 401, "authentication_error", "no API key; send header authorization: Bearer KEY"),
        ("Basic x", 401, "authentication_error", "must be `Bearer` followed by an API key"),
        ("Bearer fsk_wrong", 401, "authentication_error", "invalid API key"),
        ("operator", 403, "permission_error", "has scope admin; this port requires generate"),
    ],
)
async def test_missing_and_wrong_keys(keyed, authorization, code, kind, message):
    stack, keys = keyed
    if authorization in keys:
        authorization = f"Bearer {keys[authorization]}"
    headers = {"authorization": authorization} if authorization else {}
    async with httpx2.AsyncClient(base_url=base(stack), headers=headers) as client:
        for path in (CHAT, "/v1/completions", "/tokenize", "/nothing"):
            reply = await client.post(path, json=ASKED)
            assert (reply.status_code, reply.json()["error"]["type"]) == (code, kind)
            assert message in reply.json()["error"]["message"]
            assert (reply.headers.get("www-authenticate") == "Bearer") == (code == 401)
        assert (await client.get("/v1/models")).status_code == code
        assert (await client.get("/openapi.json")).status_code == code
        assert (await client.get("/health")).status_code == 200  # probes send no keys
        assert (await client.get("/version")).status_code == 200


async def test_openai_sends_the_key_and_the_key_has_limits(keyed):
    stack, keys = keyed
    async with openai.AsyncOpenAI(base_url=f"{base(stack)}/v1", api_key="fsk_wrong") as client:
        with pytest.raises(openai.AuthenticationError, match="invalid API key"):
            await client.chat.completions.create(model="target", **ASKED)
    for name in ("team", "hasty"):
        async with openai.AsyncOpenAI(
            base_url=f"{base(stack)}/v1", api_key=keys[name], max_retries=0
        ) as client:
            assert (await client.chat.completions.create(model="target", **ASKED)).choices
            if name == "hasty":
                with pytest.raises(
                    openai.RateLimitError, match="limit of 1 requests per minute"
                ) as e:
                    await client.chat.completions.create(model="target", **ASKED)
                assert 1 <= int(e.value.response.headers["retry-after"]) <= 60
                with pytest.raises(openai.RateLimitError):
                    await client.chat.completions.create(model="target", stream=True, **ASKED)
    served = parse_of(stack)
    assert served.total("flyspec_requests_total", status="OK") >= 2
    assert served.total("flyspec_http_requests_total", path=CHAT, code="429") == 2
    assert served.total("flyspec_http_requests_total", path="other", code="401") >= 1
    assert served.total("flyspec_http_open_requests") == 0


def parse_of(stack):
    return parse(generate_latest(stack.registry).decode())


async def test_other_origins_pages_only_if_allowed(keyed, url):
    stack, keys = keyed
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "x"}
    async with httpx2.AsyncClient() as client:
        for origin, allowed in (("https://chat.example.com", True), ("https://evil.com", False)):
            headers = {"origin": origin, "authorization": f"Bearer {keys['team']}"}
            reply = await client.post(base(stack) + CHAT, json=ASKED, headers=headers)
            granted = reply.headers.get("access-control-allow-origin")
            assert granted == (origin if allowed else None)
            reply = await client.options(base(stack) + CHAT, headers={"origin": origin, **asked})
            assert (reply.headers.get("access-control-allow-origin") == origin) == allowed
        headers = {"origin": "https://chat.example.com"}
        reply = await client.post(url + CHAT, json=ASKED, headers=headers)
        assert "access-control-allow-origin" not in reply.headers  # off by default


@pytest.fixture(scope="module")
async def encrypted(chat_dirs, tmp_path_factory):
    """A stack whose orchestrator's ports require client certificates with one name."""
    ours = Authority(tmp_path_factory.mktemp("ca"))
    server = ours.server()
    options = {
        "ssl_certfile": server.certfile, "ssl_keyfile": server.keyfile,
        "ssl_ca_certs": ours.file, "ssl_client_names": "friend", "upstream_tls": False,
    }  # fmt: skip
    async with start_stack(chat_dirs, http_port=0, **options) as running:
        yield running, ours, server


async def ask(stack, ours, pair=None):
    context = ssl.create_default_context(cafile=ours.file)
    if pair is not None:
        context.load_cert_chain(pair.certfile, pair.keyfile)
    async with httpx2.AsyncClient(verify=context, timeout=30) as client:
        return await client.post(f"https://localhost:{stack.http_port}{CHAT}", json=ASKED)


async def test_client_certificates_and_their_names(encrypted):
    stack, ours, _ = encrypted
    assert (await ask(stack, ours, ours.pair("friend"))).status_code == 200
    reply = await ask(stack, ours, ours.pair("stranger"))
    assert (reply.status_code, reply.json()["error"]["type"]) == (403, "permission_error")
    assert "name (stranger" in reply.json()["error"]["message"]
    with pytest.raises(httpx2.TransportError):
        await ask(stack, ours)
    async with httpx2.AsyncClient() as client:
        with pytest.raises(httpx2.TransportError):
            await client.get(f"http://localhost:{stack.http_port}/health")


async def test_new_certificates_are_used_at_the_next_handshake(encrypted):
    stack, ours, server = encrypted
    replace_files(server, ours.server("renewed"))
    context = ssl.create_default_context(cafile=ours.file)
    friend = ours.pair("friend")
    context.load_cert_chain(friend.certfile, friend.keyfile)
    _, writer = await asyncio.open_connection("localhost", stack.http_port, ssl=context)
    assert writer.get_extra_info("peercert")["subject"][0][0][1] == "renewed"
    writer.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host": "0.0.0.0"}, "would listen unencrypted beyond this machine"),
        ({"http_port": "taken"}, r"--http-port \d+: cannot listen on 127.0.0.1: Address already"),
    ],
)
async def test_ports_that_are_not_opened(settings, message):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        if "http_port" in settings:
            settings = {"http_port": taken.getsockname()[1]}
        chosen = OrchestratorSettings(**settings)
        registry = CollectorRegistry()
        with pytest.raises(ConfigError, match=message):
            await make_server(None, None, chosen, None, None, 1, registry).start()
