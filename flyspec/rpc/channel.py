"""Channels to servers, reopened when their certificates change."""

from __future__ import annotations

import asyncio

import grpc

from flyspec.rpc.sizes import MAX_MESSAGE_BYTES
from flyspec.security import ChannelSecurity

RETIRED_S = 1e8
"""Grace period of a channel with outdated certificates: in effect, until its last call ends."""
KEEPALIVE = [
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # gRPC's core waits for this one (a minute by default), not for the timeout before it.
    ("grpc.http2.ping_timeout_ms", 10_000),
]
"""A connection without an answer to a ping ends after 30 seconds of silence."""
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    *KEEPALIVE,
    # One connection per channel, so that closing the channel closes it.
    ("grpc.use_local_subchannel_pool", 1),
    # Reconnect soon after a service comes back; gRPC's default backs off up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]


def connect(
    address: str,
    credentials: grpc.ChannelCredentials | None = None,
    server_name: str = "",
    max_receive_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.aio.Channel:
    """Open a channel to `host:port`; it connects on first use and reconnects automatically.

    Plaintext without `credentials`. `server_name` is the name that the server's certificate must
    have (empty: the address's host). A message larger than `max_receive_bytes` ends its call with
    RESOURCE_EXHAUSTED.
    """
    options = _options(server_name if credentials else "", max_receive_bytes)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, credentials, options)


def connect_blocking(address: str, security: ChannelSecurity | None) -> grpc.Channel:
    """Like `connect`, for threads instead of coroutines."""
    if security is None:
        return grpc.insecure_channel(address, _options())
    return grpc.secure_channel(address, security.credentials, _options(security.target_name))


def _options(
    server_name: str = "", max_receive_bytes: int = MAX_MESSAGE_BYTES
) -> list[tuple[str, int | str]]:
    options: list[tuple[str, int | str]] = [
        *CHANNEL_OPTIONS,
        ("grpc.max_receive_message_length", max_receive_bytes),
    ]
    return [*options, ("grpc.ssl_target_name_override", server_name)] if server_name else options


class Link:
    """A channel to `host:port`, opened on first use; plaintext without `security`.

    When the certificate files change, new calls get a new channel; running calls finish on the old
    one. `server_name` applies where `security` names none; see `connect`.
    """

    def __init__(
        self,
        address: str,
        security: ChannelSecurity | None = None,
        server_name: str = "",
        max_receive_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.address = address
        self._max_receive_bytes = max_receive_bytes
        self._security = security
        self._server_name = (security.target_name if security else "") or server_name
        self._channel: grpc.aio.Channel | None = None
        self._credentials: grpc.ChannelCredentials | None = None
        self._retired: dict[grpc.aio.Channel, asyncio.Task[None]] = {}

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel for a new call; a new channel if the certificates have changed."""
        credentials = self._security.credentials if self._security else None
        if self._channel is None or credentials is not self._credentials:
            self._retire()
            self._credentials = credentials
            self._channel = connect(
                self.address, credentials, self._server_name, self._max_receive_bytes
            )
        return self._channel

    async def close(self) -> None:
        """Close the connection and cancel its calls; a later call opens a new one."""
        self._retire()
        channels, self._retired = self._retired, {}
        for channel, ending in channels.items():
            ending.cancel()
            await channel.close()

    def _retire(self) -> None:
        """Let the current channel's calls finish."""
        channel, self._channel = self._channel, None
        if channel is not None:
            ending = asyncio.get_running_loop().create_task(channel.close(RETIRED_S))
            self._retired[channel] = ending
            ending.add_done_callback(lambda _: self._retired.pop(channel, None))
