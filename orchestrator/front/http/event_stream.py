"""A response of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Protocol

from starlette.responses import Response

from flyspec.errors import FlyspecError

STOPPED = "stopped"
"""In a scope's state, once the server has cancelled the answer: the error to answer with."""


class Streamed(Protocol):
    """A reply as a stream needs it."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers, once the reply has begun."""

    def failure(self, error: FlyspecError) -> bytes:
        """Return the end of a stream that fails."""


class EventStream(Response):
    """Sends `frames`, made of `events`; both are closed at the end, however it comes.

    The response begins with the first frame, so that a refused request gets its own code. If the
    client does not read, that is thrown into `events`, so that the request counts as failed. If the
    server stops (`STOPPED` in the scope's state), the stream ends with the reply's `failure`.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        events: AsyncGenerator[Any, None],
        reply: Streamed,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._frames, self._events, self._reply = frames, events, reply

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with aclosing(self._events), aclosing(self._frames):
            frame = await anext(self._frames)
            self.headers.update(self._reply.headers)
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            try:
                await send(_body(frame))
                async for frame in self._frames:
                    await send(_body(frame))
            except FlyspecError as error:
                await self._frames.aclose()
                await self._events.athrow(error)
            except asyncio.CancelledError:
                stopped = scope["state"].get(STOPPED)
                task = asyncio.current_task()
                if stopped is None or task is None:
                    raise
                task.uncancel()
                await send(_body(self._reply.failure(stopped)))
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _body(frame: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": frame, "more_body": True}
