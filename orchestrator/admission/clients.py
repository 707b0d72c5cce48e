"""Identifies clients and limits their concurrent requests and requests per minute."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from flyspec.errors import InvalidArgumentError, PermissionDeniedError, ResourceExhaustedError
from flyspec.metadata import CLIENT_ID_KEY
from flyspec.security import ApiKey

MAX_CLIENT_ID_CHARACTERS = 128
MAX_IDLE_CLIENTS = 10_000
"""Maximum idle clients remembered: about 2 MB, whatever names they send."""
IPV6_CLIENT_BITS = 64
"""Providers assign each customer at least a /64, so it counts as one client."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The client behind a request and the request's deadline, as known to the transport.

    `client_id` is the name the client sent, `address` its address without the port, `key` its API
    key if keys are required. `deadline` is in event loop time; None for no deadline. `request_id`
    (generated if empty) and `traceparent` are for logs and traces. Unless it is `counted`, the
    request is part of one that counts already towards the requests per minute. `visit` is
    admission's, if it began before the request was read.
    """

    address: str = ""
    client_id: str = ""
    key: ApiKey | None = None
    deadline: float | None = None
    request_id: str = ""
    traceparent: str = ""
    counted: bool = True
    visit: Any = None

    @property
    def client(self) -> str:
        """The client's name: that of its API key, else its client ID, else its address.

        A client ID is unverified: it tells apart clients that share an address, but does not stop
        a client that lies. It is ignored where keys are required. Raises `InvalidArgumentError` if
        it is too long.
        """
        if self.key is None and len(self.client_id) > MAX_CLIENT_ID_CHARACTERS:
            raise InvalidArgumentError(
                f"{CLIENT_ID_KEY}: at most {MAX_CLIENT_ID_CHARACTERS} characters allowed, "
                f"got {len(self.client_id)}"
            )
        return self.shown

    @property
    def shown(self) -> str:
        """The client's name in logs and traces: `client`, truncated if too long."""
        if self.key is not None:
            return f"key:{self.key.name}"
        if self.client_id:
            return f"id:{self.client_id[:MAX_CLIENT_ID_CHARACTERS]}"
        return self.address


NOBODY = Caller()


def address_of(peer: str) -> str:
    """Return the address of a gRPC peer such as `ipv6:%5B::1%5D:50050`; for IPv6, its /64."""
    kind, _, rest = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return kind  # e.g. unix: all local clients
    return network_of(rest.rpartition(":")[0]) or rest


def network_of(host: str) -> str:
    """Return a host's address; for IPv6, its /64. Empty if it is no IP address."""
    host = host.strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, IPV6_CLIENT_BITS), strict=False))
    return host


def check_tokens(key: ApiKey | None, tokens: int) -> None:
    """Refuse a request whose prompt and output may exceed its key's token limit."""
    limit = key.max_tokens_per_request if key else None
    if key is not None and limit is not None and tokens > limit:
        raise PermissionDeniedError(
            f"max_tokens: prompt and output may reach {tokens} tokens, but the API key {key.name} "
            f"allows {limit} per request; shorten the prompt or lower max_tokens"
        )


@dataclass(slots=True)
class _Client:
    """A client's running requests, and its remaining requests per minute as of time `at`."""

    active: int
    allowance: float
    at: float


class ClientLimits:
    """Limits each client's concurrent requests and requests per minute (0: no limit).

    An API key's own limits take precedence. A client may send a minute's requests at once; its
    allowance then refills evenly. Beyond `MAX_IDLE_CLIENTS` idle clients, the longest idle are
    forgotten.
    """

    def __init__(
        self,
        max_concurrent: int = 0,
        max_per_minute: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_concurrent, self._max_per_minute = max_concurrent, max_per_minute
        self._clock = clock
        self._busy: dict[str, _Client] = {}
        self._idle: OrderedDict[str, _Client] = OrderedDict()

    def enter(
        self, name: str, retry_after_s: float, key: ApiKey | None = None, counted: bool = True
    ) -> None:
        """Count a starting request of client `name`, `counted` per minute; `leave` must follow.

        Raises `ResourceExhaustedError`, with `retry_after_s` if too many requests are running.
        """
        max_concurrent, max_per_minute = self._max_concurrent, self._max_per_minute
        if key is not None:
            max_concurrent = key.max_concurrent or max_concurrent
            max_per_minute = key.max_requests_per_minute or max_per_minute
        elif not max_concurrent and not max_per_minute:
            return
        now = self._clock()
        client = self._busy.get(name) or self._idle.get(name)
        if client is None:
            client = _Client(0, max_per_minute, now)
        if max_concurrent and client.active >= max_concurrent:
            raise ResourceExhaustedError(
                f"too many concurrent requests from this client ({client.active} running); wait "
                "for one to finish",
                retry_after_s,
            )
        if max_per_minute and counted:
            _refill(client, now, max_per_minute)
            if client.allowance < 1:
                missing = (1 - client.allowance) * 60 / max_per_minute
                raise ResourceExhaustedError(
                    f"this client reached its limit of {max_per_minute} requests per minute",
                    missing,
                )
            client.allowance -= 1
        client.active += 1
        self._idle.pop(name, None)
        self._busy[name] = client

    def leave(self, name: str) -> None:
        client = self._busy.get(name)
        if client is None:
            return
        client.active -= 1
        if client.active:
            return
        self._idle[name] = self._busy.pop(name)
        if len(self._idle) > MAX_IDLE_CLIENTS:
            self._idle.popitem(last=False)


def _refill(client: _Client, now: float, max_per_minute: int) -> None:
    """Credit the allowance gained since `client.at`."""
    gained = (now - client.at) * max_per_minute / 60
    client.allowance = min(float(max_per_minute), client.allowance + gained)
    client.at = now
