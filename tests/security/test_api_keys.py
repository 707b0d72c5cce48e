"""API keys on a running orchestrator: permissions and limits."""

from __future__ import annotations

import asyncio
import datetime
import logging
from contextlib import aclosing, asynccontextmanager

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from flyspec import rpc
from flyspec.client import AdminClient, AsyncClient, Credentials, GenerateOptions
from flyspec.errors import (
    InvalidArgumentError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
)
from flyspec.security import ApiKey, Scope
from flyspec.security.keys import entry_of, new_key
from tests.observability.scraping import settled
from tests.orchestrator.stacks import start_stack

SHORT = GenerateOptions(max_tokens=4)
LONG = GenerateOptions(max_tokens=250, ignore_eos=True, num_speculative_tokens=2)
GENERATE = frozenset({Scope.GENERATE})


class Keys:
    """A file of keys, and clients with one."""

    def __init__(self, file) -> None:
        self.file = file
        self._entries: dict[str, str] = {}
        self.keys: dict[str, str] = {}
        self.address = self.admin_address = ""
        self.registry = None

    def add(self, name: str, scopes=GENERATE, **limits) -> None:
        self.keys[name] = new_key()
        self._entries[name] = entry_of(self.keys[name], ApiKey(name, frozenset(scopes), **limits))
        self._write()

    def remove(self, name: str) -> None:
        del self._entries[name]
        self._write()

    def _write(self) -> None:
        self.file.write_text("\n".join(self._entries.values()))

    def client(self, name: str, **more) -> AsyncClient:
        return AsyncClient(
            self.address, credentials=Credentials(self.keys.get(name, name)), max_retries=0, **more
        )

    def admin(self, name: str) -> AdminClient:
        return AdminClient(self.admin_address, Credentials(self.keys.get(name, name)))


@asynccontextmanager
async def keyed_stack(model_dirs, file, **options):
    keys = Keys(file)
    keys.add("team")
    keys.add("operator", {Scope.ADMIN})
    async with start_stack(model_dirs, api_keys_file=str(file), **options) as running:
        keys.address, keys.admin_address = running.client.address, running.admin.address
        keys.registry = running.registry
        yield keys


@pytest.fixture(scope="module")
async def keys(model_dirs, tmp_path_factory):
    async with keyed_stack(model_dirs, tmp_path_factory.mktemp("keys") / "keys.toml") as found:
        yield found


async def test_missing_wrong_and_expired_keys_are_unauthenticated(keys):
    keys.add("late", expires=datetime.datetime.now(datetime.UTC))
    for key, message in (
        ("", r"no API key; .*FLYSPEC_API_KEY"),
        (new_key(), "invalid API key"),
        ("fsk_" + "x" * 5000, "must be `Bearer` followed by"),
        ("late", "API key of late has expired"),
    ):
        async with keys.client(key) as client:
            for call in (client.complete("a", SHORT), client.list_models()):
                with pytest.raises(UnauthenticatedError, match=message):
                    await call


async def test_a_key_opens_the_ports_of_its_scopes(keys):
    async with keys.client("team") as client:
        assert len((await client.complete("a", SHORT)).token_ids) == 4
        assert await client.list_models()
    async with keys.client("operator") as client:
        with pytest.raises(PermissionDeniedError, match="scope admin; this port requires generate"):
            await client.complete("a", SHORT)
    async with keys.admin("team") as admin:
        with pytest.raises(PermissionDeniedError, match="this port requires admin"):
            await admin.drain()
    async with keys.admin("") as admin:
        with pytest.raises(UnauthenticatedError, match="no API key"):
            await admin.status()
    async with keys.admin("operator") as admin:
        assert (await admin.status()).ready


async def test_what_a_key_used_is_counted_logged_and_traced_by_its_name(keys, caplog):
    before = await settled(keys.registry)
    caplog.set_level("INFO", logger="orchestrator.telemetry.requests")
    async with keys.client("team", client_id="somebody else") as client:
        await client.complete("a", SHORT)
        with pytest.raises(InvalidArgumentError):
            await client.complete("", SHORT)
    added = (await settled(keys.registry)).since(before)
    assert added.total("flyspec_key_requests_total", key="team") == 2
    assert added.total("flyspec_key_requests_total", key="team", status="OK") == 1
    assert added.total("flyspec_key_output_tokens_total", key="team") == 4
    ended = [r for r in caplog.records if r.message == "request ended"]
    assert {r.fields["client"] for r in ended} == {"key:team"}


async def test_health_is_open_and_reflection_is_not(keys):
    for client in (keys.client(""), keys.admin("")):
        async with client:
            assert await client.check_health() == "SERVING"
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async with rpc.connect(keys.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        for metadata, status in {
            (): grpc.StatusCode.UNAUTHENTICATED,
            (("authorization", f"bearer {keys.keys['operator']}"),): grpc.StatusCode.OK,
        }.items():
            call = stub.ServerReflectionInfo(metadata=metadata)
            if status is grpc.StatusCode.OK:
                await call.write(request)
                assert (await call.read()).list_services_response.service
                await call.done_writing()
                assert await call.read() is grpc.aio.EOF
            assert await asyncio.wait_for(call.code(), 30) is status


async def test_nothing_is_read_of_a_request_without_a_key(keys):
    async with rpc.connect(keys.address) as channel:
        call = channel.unary_stream("/flyspec.v1.GenerationService/Generate")(b"\xff\xff\xff")
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED  # not INVALID_ARGUMENT
        # A request that never comes is not waited for.
        silent = channel.stream_stream("/flyspec.v1.GenerationService/Generate")()
        assert await asyncio.wait_for(silent.code(), 30) is grpc.StatusCode.UNAUTHENTICATED


async def test_a_key_has_limits_of_its_own_and_says_when_to_come_back(keys):
    keys.add("slow", max_requests_per_minute=2)
    async with keys.client("slow") as client:
        await client.complete("a", SHORT)
        await client.complete("a", SHORT)
        with pytest.raises(ResourceExhaustedError, match="2 requests per minute") as caught:
            await client.complete("a", SHORT)
        assert 20 < caught.value.retry_after_s <= 30
    keys.add("narrow", max_concurrent=1)
    # What a client calls itself does not give it more.
    async with (
        keys.client("narrow") as client,
        keys.client("narrow", client_id="b") as other,
        keys.client("team") as team,
        aclosing(client.generate("a", LONG)) as events,
    ):
        await anext(events)
        with pytest.raises(ResourceExhaustedError, match="too many concurrent") as caught:
            await other.complete("a", SHORT)
        assert caught.value.retry_after_s > 0
        await team.complete("a", SHORT)
    keys.add("small", max_tokens_per_request=40)
    async with keys.client("small") as client:
        await client.complete("a", SHORT)
        with pytest.raises(PermissionDeniedError, match="small allows 40 per request; shorten"):
            await client.complete("a", GenerateOptions(max_tokens=50))


async def test_the_settings_limit_keys_that_have_no_limit_of_their_own(model_dirs, tmp_path):
    options = {"max_requests_per_minute_per_client": 1}
    async with keyed_stack(model_dirs, tmp_path / "keys.toml", **options) as found:
        found.add("fast", max_requests_per_minute=1000)
        async with found.client("team") as team, found.client("fast") as fast:
            await team.complete("a", SHORT)
            with pytest.raises(ResourceExhaustedError):
                await team.complete("a", SHORT)
            for _ in range(3):
                await fast.complete("a", SHORT)


async def test_keys_come_and_go_while_streams_run(keys):
    keys.add("new")
    async with keys.client("new") as client, aclosing(client.generate("a", LONG)) as events:
        await anext(events)
        keys.remove("new")
        with pytest.raises(UnauthenticatedError):
            await client.complete("a", SHORT)
        await anext(events)  # what runs goes on


async def test_no_key_is_in_a_log_and_admin_calls_name_their_caller(keys, caplog):
    caplog.set_level(logging.DEBUG)
    wrong = new_key()
    async with keys.client("team") as client, keys.admin("operator") as admin:
        await client.complete("a", SHORT)
        await admin.drain(resume=True)
    async with keys.client(wrong) as client:
        with pytest.raises(UnauthenticatedError):
            await client.complete("a", SHORT)
    assert "flyspec.v1.AdminService/Drain by key operator from ipv4:127.0.0.1" in caplog.text
    assert not any(key in caplog.text for key in [wrong, *keys.keys.values()])
    assert "fsk_" not in caplog.text
