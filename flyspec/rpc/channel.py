"""Channels to a server: how they are opened, and how they live."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from flyspec.rpc.sizes import MAX_MESSAGE_BYTES

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
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
) -> grpc.aio.Channel:
    """Open a channel to `host:port`; it connects on first use and reconnects by itself.

    In the clear without `credentials`. `interceptors` see every call, the first one first.
    `server_name` is the name that the server's certificate must have; empty: the address's host.
    """
    options: list[tuple[str, int | str]] = [*CHANNEL_OPTIONS]
    if credentials is None:
        return grpc.aio.insecure_channel(address, options, interceptors=[*interceptors])
    if server_name:
        options.append(("grpc.ssl_target_name_override", server_name))
    return grpc.aio.secure_channel(address, credentials, options, interceptors=[*interceptors])
