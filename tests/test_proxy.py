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


async def connect(proxy):
    host, port = proxy.address.split(":")
    return await asyncio.open_connection(host, int(port))


async def exchange(connection, data):
    reader, writer = connection
    writer.write(data)
    return await reader.readexactly(len(data))


async def test_what_goes_in_comes_out():
    data = os.urandom(3 << 20)
    async with echo() as proxy:
        reader, writer = await connect(proxy)
        writer.write(data)
        writer.write_eof()
        assert await reader.read(-1) == data
        writer.close()


async def test_a_delay_is_added_each_way_and_keeps_the_order():
    async with echo() as proxy:
        connection = await connect(proxy)
        assert await exchange(connection, b"a") == b"a"
        proxy.delay_s = 0.1
        began = time.monotonic()
        first = asyncio.create_task(exchange(connection, b"slow"))
        await asyncio.sleep(0.02)
        proxy.delay_s = 0.0
        connection[1].write(b"fast")  # does not overtake
        assert await first == b"slow"
        assert time.monotonic() - began >= 0.1
        assert await connection[0].readexactly(4) == b"fast"
        connection[1].close()


async def test_what_is_held_back_goes_on_later():
    async with echo() as proxy:
        connection = await connect(proxy)
        assert await exchange(connection, b"before") == b"before"
        proxy.stall()
        later = asyncio.create_task(exchange(connection, b"held back"))
        other = await connect(proxy)
        new = asyncio.create_task(exchange(other, b"a new connection"))
        await asyncio.sleep(0.2)
        assert not later.done()
        assert not new.done()
        proxy.flow()
        assert await later == b"held back"
        assert await new == b"a new connection"
        for _, writer in (connection, other):
            writer.close()


async def test_a_cut_ends_connections_and_the_next_one_works():
    async with echo() as proxy:
        connection = await connect(proxy)
        assert await exchange(connection, b"before") == b"before"
        assert proxy.cut() == 1
        with pytest.raises((asyncio.IncompleteReadError, OSError)):
            await exchange(connection, b"lost")
        proxy.refusing = True
        refused = await connect(proxy)
        with pytest.raises((asyncio.IncompleteReadError, OSError)):
            await exchange(refused, b"lost")
        proxy.refusing = False
        again = await connect(proxy)
        assert await exchange(again, b"after") == b"after"
        again[1].close()


async def test_forgotten_connections_stay_silent_and_new_ones_work():
    async with echo() as proxy:
        connection = await connect(proxy)
        assert await exchange(connection, b"before") == b"before"
        proxy.forget()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await exchange(connection, b"lost")
        again = await connect(proxy)
        assert await exchange(again, b"after") == b"after"
        proxy.stall()
        proxy.forget()
        other = await connect(proxy)
        held_back = asyncio.create_task(exchange(other, b"still held back"))
        await asyncio.sleep(0.1)
        assert not held_back.done()
        proxy.flow()
        assert await held_back == b"still held back"


async def test_a_server_that_is_gone_cuts():
    proxy = Proxy("127.0.0.1", 1)
    await proxy.start()
    connection = await connect(proxy)
    with pytest.raises((asyncio.IncompleteReadError, OSError)):
        await exchange(connection, b"nobody")
    await proxy.close()
