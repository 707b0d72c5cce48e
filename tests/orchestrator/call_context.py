"""The context of a call that did not come through a port."""

from __future__ import annotations

import grpc


async def takes() -> None:
    """Has room for everything."""


class Taker:
    """A call's context: its first message is read at once; `take` handles the others."""

    def __init__(self, take=takes, left_s: float | None = None) -> None:
        self.take, self.left_s = take, left_s
        self.taken = 0
        self.code: grpc.StatusCode | None = None
        self.details = ""

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def time_remaining(self) -> float | None:
        return self.left_s

    async def write(self, message) -> None:
        self.taken += 1
        if self.taken > 1:
            await self.take()

    async def abort(self, code, details, trailing_metadata=()) -> None:
        self.code, self.details = code, details
        raise grpc.aio.AbortError
