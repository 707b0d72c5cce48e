"""Who may use the HTTP port: API keys, certificates, other origins' pages."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl

import httpx2
import openai
import pytest
from prometheus_client import CollectorRegistry

from flyspec.config import OrchestratorSettings
from flyspec.errors import ConfigError, PermissionDeniedError
from flyspec.security import PortSecurity, TlsFiles
from flyspec.telemetry.logs import errors_returned
from orchestrator.front.http import server as http_server
from orchestrator.front.http.gate import Origins
from orchestrator.front.http.server import HttpServer, make_server
from tests.http.clients import CHAT, SAID, client_of, scrape
from tests.orchestrator.stacks import start_stack
from tests.security.authority import Authority, replace_files

ASKED = {"messages": SAID, "max_tokens": 2}


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
    async with client_of(stack, **headers) as client:
        for path in (CHAT, "/v1/completions", "/tokenize", "/nothing"):
            reply = await client.post(path, json=ASKED)
            assert (reply.status_code, reply.json()["error"]["type"]) == (code, kind)
            assert message in reply.json()["error"]["message"]
            assert (reply.headers.get("www-authenticate") == "Bearer") == (code == 401)
        assert (await client.get("/v1/models")).status_code == code
        assert (await client.get("/openapi.json")).status_code == code
        assert (await client.get("/health")).status_code == 200  # probes send no keys
        assert (await client.get("/version")).status_code == 200


async def test_what_is_refused_is_logged_with_its_reason(keyed, caplog, monkeypatch):
    """Once, at info: a wrong key, a body that is none, a request beyond the key's limit."""
    stack, keys = keyed
    caplog.set_level("INFO")
    monkeypatch.setattr(errors_returned, "filters", [])  # lines of earlier tests count
    async with client_of(stack) as client:
        for key, body in (("fsk_wrong", ASKED), (keys["team"], {}), (keys["brief"], ASKED)):
            headers = {"authorization": f"Bearer {key}"}
            assert (await client.post(CHAT, headers=headers, json=body)).status_code >= 400
    lines = [r.fields for r in caplog.records if r.message == "request ended with an error"]
    assert [(line["path"], line["code"], line["client"]) for line in lines] == [
        (CHAT, 401, "127.0.0.1"), (CHAT, 400, "key:team"), (CHAT, 403, "key:brief")
    ]  # fmt: skip
    for line, reason in zip(lines, ("invalid API key", "messages", "max_tokens"), strict=True):
        assert reason in line["reason"]
    assert not [r for r in caplog.records if r.message == "request ended"]


async def test_openai_sends_the_key_and_the_key_has_limits(keyed):
    stack, keys = keyed

    def client(key):
        return openai.AsyncOpenAI(base_url=f"{base(stack)}/v1", api_key=key, max_retries=0)

    asked = {"model": "target", **ASKED}
    async with client("fsk_wrong") as wrong, client(keys["hasty"]) as hasty:
        with pytest.raises(openai.AuthenticationError, match="invalid API key"):
            await wrong.chat.completions.create(**asked)
        assert (await hasty.chat.completions.create(**asked)).choices
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError, match="1 requests per minute") as refused:
                await hasty.chat.completions.create(**asked, stream=stream)
            assert 1 <= int(refused.value.response.headers["retry-after"]) <= 60
    served = scrape(stack)
    assert served.total("flyspec_requests_total", status="OK") >= 1
    assert served.total("flyspec_http_requests_total", path=CHAT, code="429") == 2
    assert served.total("flyspec_http_requests_total", path="other", code="401") >= 1
    assert served.total("flyspec_http_open_requests") == 0


async def test_other_origins_pages_only_if_allowed(keyed, url):
    stack, keys = keyed
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "x"}
    async with httpx2.AsyncClient() as client:
        for origin, allowed in (("https://chat.example.com", True), ("https://evil.com", False)):
            headers = {"origin": origin, "authorization": f"Bearer {keys['team']}"}
            reply = await client.post(base(stack) + CHAT, json=ASKED, headers=headers)
            assert reply.status_code == (200 if allowed else 403)
            granted = reply.headers.get("access-control-allow-origin")
            assert granted == (origin if allowed else None)
            reply = await client.options(base(stack) + CHAT, headers={"origin": origin, **asked})
            assert (reply.headers.get("access-control-allow-origin") == origin) == allowed
        headers = {"origin": "https://chat.example.com"}
        reply = await client.post(url + CHAT, json=ASKED, headers=headers)
        assert "access-control-allow-origin" not in reply.headers  # off by default
        assert reply.status_code == 403


EVIL = "evil.example"


@pytest.mark.parametrize(("host", "allowed"), [("localhost:8000", True), (f"{EVIL}:80", False)])
async def test_a_server_without_keys_is_not_called_by_foreign_names(bare, host, allowed):
    """A page has its own name resolve to loopback: `Host` and `Origin` agree, and are its own."""
    headers = {"host": host, "origin": f"http://{host}"}
    for path in ("/v1/models", "/health", "/"):
        reply = await bare.get(path, headers=headers)
        assert reply.status_code == (200 if allowed else 403), path
    reply = await bare.post(CHAT, json=ASKED, headers=headers)
    assert reply.status_code == (200 if allowed else 403)
    if not allowed:
        error = reply.json()["error"]
        assert error["type"] == "permission_error"
        assert repr(host) in error["message"]
        assert "--allowed-hosts" in error["message"]


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1", True),
        ("10.1.2.3:8000", True),  # probes and load balancers go by addresses
        ("[::1]:8000", True),
        ("LOCALHOST", True),
        ("app.localhost:1234", True),
        ("localhost.", True),
        ("", True),  # HTTP/1.0; every browser sends one
        (EVIL, False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("evillocalhost", False),
        ("2130706433", False),
        (f"127.0.0.1@{EVIL}", False),
        ("[::1", False),
        ("a:b:c", False),
    ],
)
def test_which_names_are_foreign(host, allowed):
    assert admits({b"host": host.encode()}) == allowed


def admits(headers, **settings):
    try:
        Origins(OrchestratorSettings(**settings)).admit(headers)
    except PermissionDeniedError:
        return False
    return True


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({}, False),
        ({"allowed_hosts": "a.example, evil.example"}, True),
        ({"allowed_hosts": "*.example"}, True),
        ({"allowed_hosts": "*.evil.example"}, False),
        ({"allowed_hosts": "*"}, True),
        ({"host": "Evil.example"}, True),  # it is told to listen there
        ({"host": ""}, False),
        ({"api_keys_file": "keys.toml"}, True),  # a page has no key
        ({"ssl_ca_certs": "ca.crt"}, True),  # nor gets past a certificate of another name
        ({"ssl_ca_certs": "ca.crt", "ssl_client_auth": "none"}, False),
    ],
)
def test_which_names_a_server_has(settings, allowed):
    assert admits({b"host": b"evil.example:8000"}, **settings) == allowed
    assert admits({b"host": b"localhost"}, **settings)


@pytest.mark.parametrize(
    ("origin", "settings", "allowed"),
    [
        ("http://localhost:8000", {}, True),
        ("https://LOCALHOST:8000", {}, True),  # a proxy ends TLS
        ("http://localhost:3000", {}, False),
        ("http://127.0.0.1:8000", {}, False),
        ("https://evil.example", {}, False),
        ("null", {}, False),  # a sandboxed page, or a file
        ("", {}, True),
        ("https://evil.example", {"api_keys_file": "keys.toml"}, False),
        ("https://evil.example", {"http_allowed_origins": "https://evil.example"}, True),
        ("http://evil.example", {"http_allowed_origins": "https://evil.example"}, False),
        ("null", {"http_allowed_origins": "*"}, True),
    ],
)
def test_whose_pages_are_served(origin, settings, allowed):
    headers = {b"host": b"localhost:8000", b"origin": origin.encode()}
    assert admits(headers, **settings) == allowed


async def test_what_other_origins_pages_send_is_not_executed(keyed, bare):
    """A browser sends text without asking before, and only then hides the answer."""
    stack, keys = keyed
    sent = {"content": json.dumps(ASKED), "headers": {"origin": f"https://{EVIL}"}}
    replies = [await bare.post(CHAT, **sent)]
    sent["headers"] |= {"authorization": f"Bearer {keys['both']}"}
    async with client_of(stack) as client:
        replies.append(await client.post(CHAT, **sent))
        sent["headers"]["origin"] = "https://chat.example.com"
        sent["headers"]["content-type"] = "application/json"
        assert (await client.post(CHAT, **sent)).status_code == 200
    for reply in replies:
        error = reply.json()["error"]
        assert (reply.status_code, error["type"]) == (403, "permission_error")
        assert "'https://evil.example'" in error["message"]
        assert "--http-allowed-origins" in error["message"]


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


def context_of(ours, pair=None):
    context = ssl.create_default_context(cafile=ours.file)
    if pair is not None:
        context.load_cert_chain(pair.certfile, pair.keyfile)
    return context


async def ask(stack, ours, pair=None):
    async with httpx2.AsyncClient(verify=context_of(ours, pair), timeout=30) as client:
        return await client.post(f"https://localhost:{stack.http_port}{CHAT}", json=ASKED)


async def test_client_certificates_and_their_names(encrypted):
    stack, ours, server = encrypted
    assert (await ask(stack, ours, ours.pair("friend"))).status_code == 200
    reply = await ask(stack, ours, ours.pair("stranger"))
    assert (reply.status_code, reply.json()["error"]["type"]) == (403, "permission_error")
    assert "name (stranger" in reply.json()["error"]["message"]
    with pytest.raises(httpx2.TransportError):
        await ask(stack, ours)
    async with httpx2.AsyncClient() as client:
        with pytest.raises(httpx2.TransportError):
            await client.get(f"http://localhost:{stack.http_port}/health")
    replace_files(server, ours.server("renewed"))  # used at the next handshake
    context = context_of(ours, ours.pair("friend"))
    _, writer = await asyncio.open_connection("localhost", stack.http_port, ssl=context)
    assert writer.get_extra_info("peercert")["subject"][0][0][1] == "renewed"
    writer.close()


async def test_a_silent_handshake_is_ended(tmp_path, monkeypatch):
    """Long before the 60 seconds of asyncio."""
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.2)
    pair = Authority(tmp_path).server()
    files = TlsFiles(pair.certfile, pair.keyfile)
    server = HttpServer(None, [0], PortSecurity("127.0.0.1", files))
    reader, writer = await asyncio.open_connection("127.0.0.1", await server.start())
    async with asyncio.timeout(30):
        assert await reader.read() == b""
    writer.close()
    await server.stop(0)


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
