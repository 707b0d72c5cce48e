"""Writing to a client that reads as fast as it likes.

gRPC's flow control makes a write wait until the client has room for the message, so a generation
does not run ahead of its reader by more than the client's own window, and nothing piles up here. A
client that takes nothing at all would hold a slot for ever; here its time is bounded.
"""

from __future__ import annotations

import asyncio
from typing import Any

from flyspec.errors import DeadlineExceededError


class Writer:
    """The answers of one call; each must be taken within `timeout_s` seconds."""

    __slots__ = ("_context", "_timeout_s")

    def __init__(self, context: Any, timeout_s: float) -> None:
        self._context, self._timeout_s = context, timeout_s

    async def write(self, message: Any) -> None:
        """Send a message once the client has room. Raises `DeadlineExceededError` if it has none.

        The call can then only be ended: a part of the message may be on its way.
        """
        try:
            async with asyncio.timeout(self._timeout_s) as timeout:
                await self._context.write(message)
        except TimeoutError:
            if not timeout.expired():
                raise
            raise DeadlineExceededError(
                f"the client read nothing for {self._timeout_s:g} s and the generation was ended; "
                "read the stream as it comes, or raise --write-timeout-s"
            ) from None
