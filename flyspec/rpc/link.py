"""A connection to one address that follows its certificates."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc

from flyspec.rpc.channel import connect
from flyspec.security import ChannelSecurity

RETIRED_S = 1e8
"""A channel whose certificates are old ends with its last call, however long that takes."""


class Link:
    """A channel to `host:port`, opened on first use; in the clear without `security`.

    When the certificates' files change, new calls get a new channel; those under way go on over the
    old one. `server_name` is the name that the server's certificate must have; empty: that of
    `security`, or else the address's host.
    """

    def __init__(
        self,
        address: str,
        security: ChannelSecurity | None = None,
        server_name: str = "",
        interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
    ) -> None:
        self.address = address
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
                self.address, credentials, self._interceptors, self._server_name
            )
        return self._channel

    async def reset(self) -> None:
        """Give up the connection and all calls on it; the next call opens another."""
        self._retire()
        channels, self._retired = self._retired, {}
        for channel, ending in channels.items():
            ending.cancel()
            await channel.close()

    async def close(self) -> None:
        """Cancel what is running and close the connection."""
        await self.reset()

    def _retire(self) -> None:
        """Let the channel's calls end by themselves."""
        channel, self._channel = self._channel, None
        if channel is not None:
            ending = asyncio.get_running_loop().create_task(channel.close(RETIRED_S))
            self._retired[channel] = ending
            ending.add_done_callback(lambda _: self._retired.pop(channel, None))
