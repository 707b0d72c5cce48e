"""Drafters over HTTP: what clients and operators are told, and who may activate one."""

from __future__ import annotations

import logging
import ssl
from types import SimpleNamespace

import httpx2
import pytest

from flyspec.client import AdminClient
from flyspec.config import OrchestratorSettings
from flyspec.credentials import Credentials
from flyspec.errors import PermissionDeniedError
from flyspec.security import ApiKey, Scope
from orchestrator.front import access
from orchestrator.front.http.drafters import Operators
from tests.http.clients import client_of
from tests.orchestrator.stacks import start_stack
from tests.security.authority import Authority
from tests.waiting import until

DRAFTERS = "/v1/drafters"
ACTIVATE = "/v1/drafters/prompt_lookup/activate"


async def test_operators_are_told_addresses_and_clients_are_not(keyed):
    stack, keys = keyed
    async with client_of(stack, keys["team"]) as team:
        reply = (await team.get(DRAFTERS)).json()
    told = reply["data"]
    assert reply["administers"] is False
    names = {"name", "kind", "state", "active", "usable", "share", "translated"}
    assert all(set(drafter) == names for drafter in told)
    assert told[0]["state"] == "ACTIVE"
    assert told[0]["usable"] is True
    async with client_of(stack, keys["operator"]) as operator:

        async def rests():
            """The list, while the drafter is not on trial, as it is after a slow answer."""
            reply = (await operator.get(DRAFTERS)).json()
            return reply["data"][0]["replicas"][0]["breaker"] == "CLOSED" and reply

        reply = await until(rests)
    whole = reply["data"]
    assert reply["administers"] is True
    assert [d["name"] for d in whole] == [d["name"] for d in told]
    (replica,) = whole[0]["replicas"]
    assert replica["address"] == whole[0]["address"] == f"127.0.0.1:{stack.draft_server.port}"
    assert {"draft_acceptance_rate", "mean_accepted_tokens", "active_generations"} <= set(
        whole[0]["stats"]
    )
    for drafter, listed in zip(whole, await admin_list(stack, keys), strict=True):
        same = listed.document()
        assert set(drafter) == set(same)
        assert {**drafter, "replicas": None} == {**same, "replicas": None}


async def admin_list(stack, keys):
    _, port = stack.orchestrator.ports
    credentials = Credentials(api_key=keys["operator"])
    async with AdminClient(f"127.0.0.1:{port}", credentials=credentials) as admin:
        return await admin.list_drafters()


async def test_an_operator_activates_drafters_and_is_logged(keyed, caplog):
    stack, keys = keyed
    caplog.set_level(logging.INFO)
    async with client_of(stack, keys["both"]) as operator:
        try:
            reply = await operator.post(ACTIVATE, json={"share": 0.25})
            assert (reply.status_code, reply.json()["state"]) == (200, "CANARY")
            assert reply.json()["share"] == 0.25
            reply = await operator.post(ACTIVATE)  # a body is not needed
            assert reply.json()["state"] == "ACTIVE"
            data = (await operator.get(DRAFTERS)).json()["data"]
            assert data[0]["name"] == "prompt_lookup"
        finally:
            assert (await operator.post("/v1/drafters/model/activate", json={})).status_code == 200
    said = [r.getMessage() for r in caplog.records if "over HTTP" in r.getMessage()]
    assert "drafter prompt_lookup activated over HTTP by key both from 127.0.0.1" in said
    assert not any(key in message for key in keys.values() for message in caplog.messages)


@pytest.mark.parametrize(
    ("path", "body", "code", "message"),
    [
        ("/v1/drafters/none/activate", {}, 404, "no drafter 'none'; choose from model"),
        (ACTIVATE, {"share": 1.5}, 400, "share must be between 0 and 1, got 1.5"),
        (ACTIVATE, {"share": "all"}, 400, "share: "),
        (ACTIVATE, {"shares": 1}, 400, "shares: there is no such parameter"),
        ("/v1/drafters/model/activate", {"share": 0.5}, 409, "is active; activate another first"),
    ],
)
async def test_what_cannot_be_activated(keyed, path, body, code, message):
    stack, keys = keyed
    async with client_of(stack, keys["operator"]) as operator:
        reply = await operator.post(path, json=body)
    assert reply.status_code == code
    assert message in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("key", "code", "message"),
    [
        ("", 401, "no API key; send header authorization: Bearer KEY"),
        ("fsk_wrong", 401, "invalid API key"),
        ("team", 403, "the API key of team has scope generate; this requires admin"),
    ],
)
async def test_only_the_admin_scope_activates(keyed, key, code, message):
    stack, keys = keyed
    async with client_of(stack, keys.get(key, key)) as client:
        reply = await client.post(ACTIVATE)
        assert reply.status_code == code
        assert message in reply.json()["error"]["message"]
        assert (await client.get("/v1/draftersx")).status_code == (404 if key == "team" else 401)
    async with client_of(stack, keys["operator"]) as operator:
        assert (await operator.get(DRAFTERS)).json()["data"][0]["name"] == "model"
        assert (await operator.get("/v1/models")).status_code == 403  # as before


async def test_without_keys_nobody_activates_over_http(served, bare):
    reply = (await bare.get(DRAFTERS)).json()
    (first, *_) = reply["data"]
    assert reply["administers"] is False
    assert first["replicas"]  # both ports are on loopback
    for headers in ({}, {"authorization": "Bearer fsk_anything"}):
        reply = await bare.post(ACTIVATE, headers=headers)
        assert reply.status_code == 403
        assert "use `flyspec drafters activate`, or give --api-keys-file" in reply.text
    assert (await served.admin.list_drafters())[0].name == "model"


def admitted(settings, client="127.0.0.1", names=(), scopes=(Scope.ADMIN,)):
    """True if a call with those, and a key of those scopes, is an operator's."""
    token = access._caller.set(ApiKey("ops", frozenset(scopes)))
    connection = SimpleNamespace(certificate_names=[*names])
    try:
        return Operators(settings).admit(
            {"client": (client, 1), "state": {"connection": connection}}
        )
    finally:
        access._caller.reset(token)


ELSEWHERE = {"client": "10.0.0.1"}
KEYED = {"api_keys_file": "keys.toml"}
OPEN = {**KEYED, "host": "0.0.0.0", "allow_insecure": True}
TLS = {"ssl_certfile": "a", "ssl_keyfile": "b", "ssl_ca_certs": "c", "host": "0.0.0.0"}
NAMED = {**KEYED, **TLS, "admin_ssl_client_names": "operator"}


@pytest.mark.parametrize(
    ("settings", "call", "message"),
    [
        (KEYED, {}, None),
        (KEYED, {"scopes": (Scope.GENERATE,)}, "has scope generate; this requires admin"),
        (KEYED, ELSEWHERE, "listens on this machine alone"),
        (OPEN, ELSEWHERE, None),
        ({**OPEN, "admin_host": "127.0.0.1"}, ELSEWHERE, "listens on this machine alone"),
        ({**KEYED, **TLS}, {}, "requires a client certificate, and this connection has none"),
        ({**KEYED, **TLS}, {"names": ["client"]}, None),
        (NAMED, {"names": ["client"]}, "name (client) is not allowed here"),
        (NAMED, {"names": ["operator"]}, None),
        ({**KEYED, **TLS, "admin_ssl_client_auth": "none"}, {}, None),
        ({}, {}, "this server has no keys"),
        (TLS, {"names": ["operator"]}, "this server has no keys"),
    ],
)
def test_http_is_never_more_open_than_the_admin_port(settings, call, message):
    chosen = OrchestratorSettings(**settings)
    if message is None:
        assert admitted(chosen, **call) == "ops"
        return
    with pytest.raises(PermissionDeniedError) as refused:
        admitted(chosen, **call)
    assert message in str(refused.value)


async def test_with_certificates_and_no_keys_addresses_stay_secret(chat_dirs, tmp_path):
    ours = Authority(tmp_path)
    server = ours.server()
    options = {
        "ssl_certfile": server.certfile, "ssl_keyfile": server.keyfile,
        "ssl_ca_certs": ours.file, "upstream_tls": False,
    }  # fmt: skip
    friend = ours.pair("friend")
    context = ssl.create_default_context(cafile=ours.file)
    context.load_cert_chain(friend.certfile, friend.keyfile)
    async with start_stack(chat_dirs, http_port=0, **options) as stack:
        url = f"https://localhost:{stack.http_port}"
        async with httpx2.AsyncClient(base_url=url, verify=context) as client:
            assert "replicas" not in (await client.get(DRAFTERS)).text
            assert (await client.post(ACTIVATE)).status_code == 403
