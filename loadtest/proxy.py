"""A TCP proxy that delays, holds back and cuts connections on command.

Client and server do not know about it. Bytes held back are forwarded later, in order, or their
connection is cut; no byte is ever changed, duplicated or dropped.
"""

from __future__ import annotations

import asyncio
import contextlib

CHUNK_BYTES = 1 << 16


class Proxy:
    """Forwards connections from its own port to `host:port`.

    `delay_s` is added to every chunk in each direction. While `refusing`, new connections are
    cut at once. `port` may change: new connections go there.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self.port = host, port
        self.delay_s = 0.0
        self.refusing = False
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._connections: dict[asyncio.Task[None], asyncio.Event] = {}
        self._server: asyncio.Server | None = None
        self.address = ""
        """The address to connect to instead, host:port, once started."""

    async def start(self) -> None:
        """Listen on a free port of the loopback."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"

    def stall(self) -> None:
        """Forward and read nothing; connections stay open, and new ones are accepted."""
        self._flowing.clear()

    def flow(self) -> None:
        """Forward again, beginning with what was held back."""
        self._flowing.set()

    def forget(self) -> None:
        """Stop forwarding on existing connections without ending them; new ones work.

        This is what a router does to connections that it no longer knows.
        """
        flows = self._flowing.is_set()
        for flowing in self._connections.values():
            flowing.clear()
        self._flowing = asyncio.Event()
        if flows:
            self._flowing.set()

    def cut(self) -> int:
        """End all connections at once, dropping what is in flight; return their number."""
        number = len(self._connections)
        for connection in self._connections:
            connection.cancel()
        return number

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        connections = list(self._connections)
        self.cut()
        await asyncio.gather(*connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.ensure_future(self._connection(reader, writer, self._flowing))
        self._connections[connection] = self._flowing
        connection.add_done_callback(lambda task: self._connections.pop(task, None))

    async def _connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flowing: asyncio.Event
    ) -> None:
        """Serve a connection until either side ends it or it is cut."""
        writers = [writer]
        with contextlib.suppress(asyncio.CancelledError):
            try:
                await flowing.wait()
                if self.refusing:
                    return
                there, back = await asyncio.open_connection(self._host, self.port)
                writers.append(back)
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._forward(reader, back, flowing))
                    both.create_task(self._forward(there, writer, flowing))
            except* OSError:
                pass  # whoever it was will notice: the other side is cut, too
            finally:
                for each in writers:
                    each.transport.abort()

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flowing: asyncio.Event
    ) -> None:
        chunk = b"-"
        while chunk:
            await flowing.wait()
            chunk = await reader.read(CHUNK_BYTES)
            await asyncio.sleep(self.delay_s)
            await flowing.wait()
            writer.write(chunk)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
