"""Who asks, and how much each client may: requests at once, and requests a minute."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import unquote

from flyspec.errors import (
    InvalidArgumentError,
    PermissionDeniedError,
    ResourceExhaustedError,
)
from flyspec.metadata import CLIENT_ID_KEY
from flyspec.security import ApiKey

MAX_CLIENT_ID_CHARACTERS = 128
MAX_IDLE_CLIENTS = 10_000
"""Clients remembered although nothing of theirs runs: some 2 MB, whatever names are sent."""
IPV6_CLIENT_BITS = 64
"""One customer of a provider has at least so large a network, and may use all of its addresses."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose a request is and when it must be over, as far as its transport knows.

    `client_id` is what the client calls itself, `address` where it is, without the port; `key` its
    API key where keys are needed. `deadline` is in the event loop's time, None for none. The
    request's own id, a new one if empty, and the span that waits for it are for logs and traces.
    """

    address: str = ""
    client_id: str = ""
    key: ApiKey | None = None
    deadline: float | None = None
    request_id: str = ""
    traceparent: str = ""

    @property
    def client(self) -> str:
        """The name of the client: its API key's, or what it calls itself, or else its address.

        The second is a claim that nothing proves: it tells clients behind one address apart, and
        does not stop one that lies; where keys are needed it does not count. Raises
        `InvalidArgumentError` for a long name.
        """
        if self.key is None and len(self.client_id) > MAX_CLIENT_ID_CHARACTERS:
            raise InvalidArgumentError(
                f"{CLIENT_ID_KEY}: at most {MAX_CLIENT_ID_CHARACTERS} characters, "
                f"got {len(self.client_id)}"
            )
        return self.shown

    @property
    def shown(self) -> str:
        """The name of the client in logs and traces: the same, cut where it is too long."""
        if self.key is not None:
            return f"key:{self.key.name}"
        if self.client_id:
            return f"id:{self.client_id[:MAX_CLIENT_ID_CHARACTERS]}"
        return self.address


NOBODY = Caller()


def address_of(peer: str) -> str:
    """The address in what gRPC calls a peer, such as `ipv6:%5B::1%5D:50050`: the /64 of an IPv6."""
    kind, _, rest = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return kind  # such as unix: everybody on this machine
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return rest
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, IPV6_CLIENT_BITS), strict=False))
    return host


def check_tokens(key: ApiKey | None, tokens: int) -> None:
    """Refuse a request that may read and write more tokens than its key allows."""
    limit = key.max_tokens_per_request if key else None
    if key is not None and limit is not None and tokens > limit:
        raise PermissionDeniedError(
            f"max_tokens: prompt and output may have {tokens} tokens, requests of {key.name} at "
            f"most {limit}; shorten the prompt or lower max_tokens"
        )


@dataclass(slots=True)
class _Client:
    """What one client does now, and how many requests it has left at time `at`."""

    active: int
    allowance: float
    at: float


class ClientLimits:
    """Requests at once and a minute of each client; 0 is no limit. A key may have other limits.

    A client may send a minute's requests at once; its allowance then refills evenly. Clients with
    nothing under way are forgotten, the longest idle first, once there are `MAX_IDLE_CLIENTS`.
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

    @property
    def num_known(self) -> int:
        """Clients remembered now."""
        return len(self._busy) + len(self._idle)

    def enter(self, name: str, retry_after_s: float, key: ApiKey | None = None) -> None:
        """Count a request that begins; `leave` must follow. `key` is the client's.

        `retry_after_s` is told to a client with too many at once. Raises `ResourceExhaustedError`.
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
                f"{client.active} requests of this client are under way, as many as one may have; "
                "wait for one to end",
                retry_after_s,
            )
        if max_per_minute:
            _refill(client, now, max_per_minute)
            if client.allowance < 1:
                missing = (1 - client.allowance) * 60 / max_per_minute
                raise ResourceExhaustedError(
                    f"this client has sent its {max_per_minute} requests a minute", missing
                )
            client.allowance -= 1
        client.active += 1
        self._idle.pop(name, None)
        self._busy[name] = client

    def leave(self, name: str) -> None:
        """A request that `enter` counted has ended."""
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
    """Add what the client was allowed since the last look."""
    gained = (now - client.at) * max_per_minute / 60
    client.allowance = min(float(max_per_minute), client.allowance + gained)
    client.at = now
