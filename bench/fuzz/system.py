"""Health and reflection, which every server has, methods that none has, and the port itself."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from random import Random
from typing import Any

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from bench.fuzz.values import TEXTS

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def _health(rng: Random) -> Any:
    return health_pb2.HealthCheckRequest(service=rng.choice(("", "flyspec.v1.No", *TEXTS)))


def _reflect(rng: Random) -> Any:
    request = reflection_pb2.ServerReflectionRequest()
    match rng.randrange(4):
        case 0:
            request.list_services = ""
        case 1:
            request.file_containing_symbol = rng.choice(("flyspec.v1.Rule", *TEXTS))
        case 2:
            request.file_by_filename = rng.choice(("flyspec/v1/common.proto", *TEXTS))
        case _:
            request.file_containing_extension.containing_type = "flyspec.v1.Rule"
            request.file_containing_extension.extension_number = rng.choice((0, -1, 1, 1 << 30))
    return request


SYSTEM_METHODS = [
    ("/grpc.health.v1.Health/Check", _health),
    ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", _reflect),
    ("/flyspec.v1.Nothing/At/All", _health),
]


async def attack_port(port: int, rng: Random) -> None:
    """A connection that speaks no gRPC, or speaks it wrongly; what the server says does not matter.

    Reads for a moment, so that the server meets the end in different places.
    """
    with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            for part in _bytes(rng):
                writer.write(part)
                await writer.drain()
            async with asyncio.timeout(rng.choice((0.0, 0.01, 0.05))):
                while await reader.read(1 << 16):
                    pass
        finally:
            if rng.random() < 0.5:
                writer.transport.abort()
            writer.close()


def _bytes(rng: Random) -> list[bytes]:
    settings = _frame(4, 0, 0, b"")
    match rng.randrange(7):
        case 0:
            return [rng.randbytes(rng.choice((1, 100, 5000)))]
        case 1:
            return [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"]
        case 2:
            return [_PREFACE, rng.randbytes(300)]
        case 3:
            frames = [
                _frame(rng.randrange(12), rng.randrange(256), rng.randrange(8), rng.randbytes(20))
                for _ in range(20)
            ]
            return [_PREFACE, settings, *frames]
        case 4:  # a frame that announces far more than comes
            return [_PREFACE, settings, b"\xff\xff\xff\x00\x00\x00\x00\x00\x01"]
        case 5:  # a request that never ends
            return [_PREFACE, settings, _headers(False)]
        case _:  # a message with a wrong prefix: a flag that is none, a length beyond all bounds
            prefix = struct.pack(
                ">BI", rng.choice((0, 1, 7)), rng.choice((0, 5, 1 << 25, (1 << 32) - 1))
            )
            return [_PREFACE, settings, _headers(False), _frame(0, 1, 1, prefix + b"\0" * 5)]


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return (
        len(payload).to_bytes(3, "big")
        + bytes([kind, flags])
        + struct.pack(">I", stream)
        + (payload)
    )


def _headers(ends: bool) -> bytes:
    """HEADERS of a call, each a literal that is not indexed."""
    block = b""
    for name, value in (
        (":method", "POST"), (":scheme", "http"), (":path", "/flyspec.v1.VerifyService/Verify"),
        (":authority", "x"), ("content-type", "application/grpc"), ("te", "trailers"),
    ):  # fmt: skip
        block += bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return _frame(1, 4 | ends, 1, block)
