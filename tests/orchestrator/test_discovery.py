"""Addresses from settings and from DNS."""

from __future__ import annotations

import asyncio
import socket

import pytest

from flyspec.errors import ConfigError
from orchestrator.fleet.discovery import Addresses


async def test_a_list_is_taken_as_it_is_each_once():
    addresses = Addresses("a:1, b:2,[::1]:3,a:1", "--x")
    assert await addresses.find() == ["a:1", "b:2", "[::1]:3"]
    assert not addresses.changes


@pytest.mark.parametrize(
    "spec", ["", ",", "a", "a:", "a:0", "a:65536", "::1:5", "dns:///a", "a b:1"]
)
def test_what_cannot_be_read_names_the_flag_and_says_what_to_give(spec):
    with pytest.raises(ConfigError, match=r"--x: .*host:port"):
        Addresses(spec, "--x")


async def test_a_name_stands_for_all_its_addresses_and_keeps_them_while_dns_fails(monkeypatch):
    answers = [["10.0.0.1", "10.0.0.2"], OSError("no answer"), ["10.0.0.2", "fd00::3"]]

    async def getaddrinfo(host, port, **_):
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in answer]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)
    addresses = Addresses("dns:///draft:50051,x:1", "--x")
    assert addresses.changes
    assert await addresses.find() == ["x:1", "10.0.0.1:50051", "10.0.0.2:50051"]
    assert await addresses.find() == ["x:1", "10.0.0.1:50051", "10.0.0.2:50051"]
    assert await addresses.find() == ["x:1", "10.0.0.2:50051", "[fd00::3]:50051"]
