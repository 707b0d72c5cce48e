"""Connections that speak no gRPC, or speak it wrongly."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from random import Random

_BEGIN = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


async def attack_port(port: int, rng: Random) -> None:
    """Open a connection and send such bytes; what the server says does not matter.

    Reads for a moment, so that the server meets the end in different places.
    """
    with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(_hostile(rng))
            await writer.drain()
            async with asyncio.timeout(rng.choice((0.0, 0.01, 0.05))):
                while await reader.read(1 << 16):
                    pass
        finally:
            if rng.random() < 0.5:
                writer.transport.abort()
            writer.close()


def _hostile(rng: Random) -> bytes:
    length = rng.choice((0, 5, 1 << 25, (1 << 32) - 1))
    message = struct.pack(">BI", rng.choice((0, 1, 7)), length) + b"\0" * 5
    path, kind = b"/flyspec.v1.VerifyService/Verify", b"application/grpc"
    # HPACK: POST, http, then literals of which the names are in the static table.
    headers = b"\x83\x86\x04\x20" + path + b"\x01\x01x\x0f\x10\x10" + kind
    headers += b"\x00\x02te\x08trailers"
    call = _BEGIN + _frame(4, 0, 0, b"") + _frame(1, 4, 1, headers)
    frames = [_frame(rng.randrange(12), rng.randrange(256), rng.randrange(8), rng.randbytes(20))
              for _ in range(20)]  # fmt: skip
    return rng.choice((
        rng.randbytes(rng.choice((1, 100, 5000))), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        _BEGIN + rng.randbytes(300), _BEGIN + _frame(4, 0, 0, b"") + b"".join(frames),
        _BEGIN + _frame(4, 0, 0, b"") + b"\xff\xff\xff" + bytes(5) + b"\x01",  # less than announced
        call, call + _frame(0, 1, 1, message),
    ))  # fmt: skip


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags])
    return head + struct.pack(">I", stream) + payload
