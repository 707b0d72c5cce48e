"""The connection to a service behind the orchestrator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flyspec import rpc


class Upstream:
    """A service at an address, spoken to through `stub`; `timeout_s` is for one answer."""

    def __init__(self, address: str, timeout_s: float, make_stub: Callable[[Any], Any]) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._make_stub = make_stub
        self._connect()

    def _connect(self) -> None:
        self._channel = rpc.connect(self.address)
        self.stub: Any = self._make_stub(self._channel)

    async def reconnect(self) -> None:
        """Give the connection up, which may be lost without a sign, and make another one.

        Ends all streams. gRPC itself would find out by keepalive, half a minute later.
        """
        lost = self._channel
        self._connect()
        await lost.close()

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()
