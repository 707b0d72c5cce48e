"""Synchronous channels: unencrypted, with TLS, with a client certificate and a key."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flyspec.client import Credentials
from flyspec.errors import ConfigError
from loadtest.protocols import connect
from tests.security.authority import Authority, credentials, files
from tests.security.ports import listening


async def health(address, credentials):
    """Ask, in a thread."""

    def ask():
        with connect(address, credentials) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            return stub.Check(request, timeout=5.0).status

    return await asyncio.to_thread(ask)


async def test_tls_with_and_without_a_certificate(tmp_path):
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
