"""Identifying clients, and their limits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flyspec.errors import InvalidArgumentError, ResourceExhaustedError
from orchestrator.admission import clients as module
from orchestrator.admission.clients import ClientLimits, address_of
from orchestrator.front.grpc import caller_of
from tests.orchestrator.clock import Clock


def client_of(peer="ipv4:10.0.0.7:4711", **metadata):
    pairs = tuple((key.replace("_", "-"), value) for key, value in metadata.items())
    context = SimpleNamespace(
        invocation_metadata=lambda: pairs, peer=lambda: peer, time_remaining=lambda: None
    )
    return caller_of(context).client


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.7:4711", "10.0.0.7"),
        ("ipv6:%5B::1%5D:50050", "::/64"),
        ("ipv6:[2001:db8:1:2:3:4:5:6]:1", "2001:db8:1:2::/64"),
        ("ipv6:%5B2001:db8:1:2:ffff::9%5D:2", "2001:db8:1:2::/64"),
        ("ipv6:%5B::ffff:10.0.0.7%5D:4711", "10.0.0.7"),
        ("ipv6:%5Bfe80::1%25eth0%5D:4711", "fe80::/64"),
        ("unix:/run/socket", "unix"),
        ("unix:", "unix"),
        ("ipv4:nonsense", "nonsense"),
        ("", ""),
    ],
)
def test_addresses(peer, address):
    assert address_of(peer) == address


def test_a_client_is_what_it_says_or_else_its_address():
    assert client_of() == "10.0.0.7"
    assert client_of(flyspec_client_id="") == "10.0.0.7"
    assert client_of(other="x", flyspec_client_id="batch") == "id:batch"
    # A name that looks like an address is not that address.
    assert client_of(flyspec_client_id="10.0.0.7") != client_of()
    with pytest.raises(InvalidArgumentError, match="flyspec-client-id: at most 128"):
        client_of(flyspec_client_id="x" * 129)


def test_requests_at_once():
    limits = ClientLimits(max_concurrent=2)
    limits.enter("a", 3.0)
    limits.enter("a", 3.0)
    limits.enter("b", 3.0)
    with pytest.raises(
        ResourceExhaustedError, match=r"concurrent requests .*\(2 running"
    ) as caught:
        limits.enter("a", 3.0)
    assert caught.value.retry_after_s == 3.0
    limits.leave("a")
    limits.enter("a", 3.0)


def test_requests_a_minute():
    clock = Clock()
    limits = ClientLimits(max_per_minute=6, clock=clock)
    for _ in range(6):
        limits.enter("a", 1.0)
        limits.leave("a")
    with pytest.raises(ResourceExhaustedError, match="6 requests per minute") as caught:
        limits.enter("a", 1.0)
    assert caught.value.retry_after_s == pytest.approx(10.0)
    limits.enter("b", 1.0)
    clock.now += 9.9
    with pytest.raises(ResourceExhaustedError) as caught:
        limits.enter("a", 1.0)
    assert caught.value.retry_after_s == pytest.approx(0.1)
    clock.now += 0.11
    limits.enter("a", 1.0)
    clock.now += 3600
    for _ in range(6):  # no more than a minute's is saved up
        limits.enter("a", 1.0)
    with pytest.raises(ResourceExhaustedError):
        limits.enter("a", 1.0)


def test_a_refused_request_costs_nothing():
    limits = ClientLimits(max_concurrent=1, max_per_minute=2, clock=Clock())
    limits.enter("a", 1.0)
    for _ in range(10):
        with pytest.raises(ResourceExhaustedError, match="too many concurrent"):
            limits.enter("a", 1.0)
    limits.leave("a")
    limits.enter("a", 1.0)


def test_without_limits_nobody_is_remembered():
    limits = ClientLimits()
    limits.enter("a", 1.0)
    assert limits.num_known == 0
    limits.leave("a")


def test_memory_is_bounded_whatever_names_are_sent(monkeypatch):
    monkeypatch.setattr(module, "MAX_IDLE_CLIENTS", 50)
    limits = ClientLimits(max_concurrent=1, max_per_minute=1, clock=Clock())
    limits.enter("busy", 1.0)
    for i in range(1000):
        limits.enter(f"name {i}", 1.0)
        limits.leave(f"name {i}")
    assert limits.num_known == 51
    with pytest.raises(ResourceExhaustedError):  # who is busy is not forgotten
        limits.enter("busy", 1.0)
    with pytest.raises(ResourceExhaustedError):  # nor are the latest
        limits.enter("name 999", 1.0)
    limits.enter("name 1", 1.0)
