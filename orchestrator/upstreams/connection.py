"""The connection to a service behind the orchestrator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flyspec import rpc


class Upstream:
    """A service at an address, spoken to through `stub`; `timeout_s` is for one answer.

    `link` is the connection; one in the clear if not given.
    """

    def __init__(
        self,
        address: str,
        timeout_s: float,
        make_stub: Callable[[Any], Any],
        link: rpc.Link | None = None,
    ) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._make_stub = make_stub
        self._link = link or rpc.Link(address)
        self._made: tuple[Any, Any] = (None, None)

    @property
    def stub(self) -> Any:
        """The methods of the service, over the channel that is to be used now."""
        channel = self._link.channel
        if self._made[0] is not channel:
            self._made = channel, self._make_stub(channel)
        return self._made[1]

    async def reconnect(self) -> None:
        """Give the connection up, which may be lost without a sign; the next call makes another.

        Ends all streams. gRPC itself would find out by keepalive, half a minute later.
        """
        await self._link.reset()

    async def close(self) -> None:
        """Close the connection."""
        await self._link.close()
