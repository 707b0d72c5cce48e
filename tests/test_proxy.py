"""The chaos suite's proxy does not change, duplicate or lose bytes, and obeys commands."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import asynccontextmanager

import pytest

from loadtest.proxy import Proxy


@asynccontextmanager
async def echo():
    """An echo server, and a proxy in front of it."""

    async def serve(reader, writer):
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
            writer.write_eof()
        except OSError:
            pass

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    proxy = Proxy("127.0.0.1", server.sockets[0].getsockname()[1])
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()
        server.close()


async def connected(proxy):
    """A connection through which bytes have come back."""
    host, port = proxy.address.split(":")
    connection = await asyncio.open_connection(host, int(port))
    assert await exchange(connection, b"before") == b"before"
    return connection


async def exchange(connection, data):
    reader, writer = connection
    writer.write(data)
    return await reader.readexactly(len(data))


LOST = pytest.raises((asyncio.IncompleteReadError, OSError))


async def test_bytes_arrive_whole_and_in_order_however_long_they_take():
    data = os.urandom(3 << 20)
    async with echo() as proxy:
        reader, writer = connection = await connected(proxy)
        assert await exchange(connection, data) == data
        proxy.delay_s = 0.1
        began = time.monotonic()
        first = asyncio.create_task(exchange(connection, b"slow"))
        await asyncio.sleep(0.02)
        proxy.delay_s = 0.0
        writer.write(b"fast")  # does not overtake
        assert await first == b"slow"
        assert time.monotonic() - began >= 0.1
        assert await reader.readexactly(4) == b"fast"
        proxy.stall()
        later = asyncio.create_task(exchange(connection, b"held back"))
        new = asyncio.create_task(connected(proxy))
        await asyncio.sleep(0.2)
        assert not later.done()
        assert not new.done()
        proxy.flow()
        assert await later == b"held back"
        await new


async def test_a_cut_ends_connections_and_the_next_one_works():
    async with echo() as proxy:
        connection = await connected(proxy)
        assert proxy.cut() == 1
        with LOST:
            await exchange(connection, b"lost")
        proxy.refusing = True
        with LOST:
            await connected(proxy)
        proxy.refusing = False
        silent = await connected(proxy)
        proxy.forget()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(exchange(silent, b"lost"), 0.2)
        await connected(proxy)


async def test_a_server_that_is_gone_cuts():
    proxy = Proxy("127.0.0.1", 1)
    await proxy.start()
    with LOST:
        await connected(proxy)
    await proxy.close()
