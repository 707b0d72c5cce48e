"""Channels to a server: how they are opened, live, and follow their certificates."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc

from flyspec.rpc.sizes import MAX_MESSAGE_BYTES
from flyspec.security import ChannelSecurity

RETIRED_S = 1e8
"""A channel whose certificates are old ends with its last call, however long that takes."""
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Every channel has a connection of its own, so that closing it closes the connection.
    ("grpc.use_local_subchannel_pool", 1),
    # Reconnect soon after a service comes back; gRPC's own default backs off to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]


def connect(
    address: str,
    credentials: grpc.ChannelCredentials | None = None,
    interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
    server_name: str = "",
    max_receive_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.aio.Channel:
    """Open a channel to `host:port`; it connects on first use and reconnects by itself.

    In the clear without `credentials`. `interceptors` see every call, the first one first.
    `server_name` is the name that the server's certificate must have; empty: the address's host.
    A call ends with RESOURCE_EXHAUSTED at a message of more than `max_receive_bytes`.
    """
    options: list[tuple[str, int | str]] = [
        *CHANNEL_OPTIONS,
        ("grpc.max_receive_message_length", max_receive_bytes),
    ]
    if credentials is None:
        return grpc.aio.insecure_channel(address, options, interceptors=[*interceptors])
    if server_name:
        options.append(("grpc.ssl_target_name_override", server_name))
    return grpc.aio.secure_channel(address, credentials, options, interceptors=[*interceptors])


class Link:
    """A channel to `host:port`, opened on first use; in the clear without `security`.

    When the certificates' files change, new calls get a new channel; those under way go on over the
    old one. `server_name` is the name that the server's certificate must have; empty: that of
    `security`, or else the address's host. `max_receive_bytes` as of `connect`.
    """

    def __init__(
        self,
        address: str,
        security: ChannelSecurity | None = None,
        server_name: str = "",
        interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
        max_receive_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.address = address
        self._max_receive_bytes = max_receive_bytes
        self._security = security
        self._server_name = (security.target_name if security else "") or server_name
        self._interceptors = interceptors
        self._channel: grpc.aio.Channel | None = None
        self._credentials: grpc.ChannelCredentials | None = None
        self._retired: dict[grpc.aio.Channel, asyncio.Task[None]] = {}

    @property
    def secure(self) -> bool:
        """Whether it speaks TLS."""
        return self._security is not None

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel for a call that begins now; another one if the certificates are new."""
        credentials = self._security.credentials if self._security else None
        if self._channel is None or credentials is not self._credentials:
            self._retire()
            self._credentials = credentials
            self._channel = connect(
                self.address,
                credentials,
                self._interceptors,
                self._server_name,
                self._max_receive_bytes,
            )
        return self._channel

    async def close(self) -> None:
        """Give up the connection and all calls on it; a call after that opens another."""
        self._retire()
        channels, self._retired = self._retired, {}
        for channel, ending in channels.items():
            ending.cancel()
            await channel.close()

    def _retire(self) -> None:
        """Let the channel's calls end by themselves."""
        channel, self._channel = self._channel, None
        if channel is not None:
            ending = asyncio.get_running_loop().create_task(channel.close(RETIRED_S))
            self._retired[channel] = ending
            ending.add_done_callback(lambda _: self._retired.pop(channel, None))
