"""Changes to the bytes of encoded messages."""

from __future__ import annotations

from random import Random

from google.protobuf.message import Message

UNKNOWN = (b"\xc0\xb8\x02\x07", b"\xc1\xb8\x02" + bytes(8), b"\xc2\xb8\x02\x02\xff\xff")
"""Fields of number 5000, which no message has: a varint, 64 bits, bytes."""


def readable(cls: type[Message], data: bytes) -> Message | None:
    """The message that the bytes are, if they are one."""
    try:
        return cls.FromString(data)
    except Exception:  # protobuf raises several kinds
        return None


def extended(data: bytes, rng: Random) -> bytes:
    """The same with a field that the message does not have, which changes nothing."""
    return rng.choice((data + rng.choice(UNKNOWN), rng.choice(UNKNOWN) + data))


def mangled(data: bytes, other: bytes, rng: Random) -> bytes:
    """Bytes that were a message, and may still be one; `other` is another message."""
    at, length = rng.randrange(len(data) + 1), rng.randint(1, 8)
    flipped = bytes([data[at] ^ 1 << rng.randrange(8)]) if at < len(data) else b""
    far = rng.choice((b"\xff\xff\x3f", b"\xff\xff\xff\xff\x07", b"\xff" * 8 + b"\x7f"))
    return rng.choice((
        data[:at] + flipped + data[at + 1 :],
        data[:at] + b"\xff" + data[at + 1 :],  # text is not UTF-8 any more
        data[:at],
        data[:at] + data[at + length :],
        data[:at] + rng.randbytes(length) + data[at:],
        data[:at] + b"\x0a" + far + data[at:],  # a length far beyond the end
        data + other,  # fields that are there twice, the later one in force
        data + junk(rng),
        junk(rng),
        junk(rng),
    ))  # fmt: skip


def junk(rng: Random) -> bytes:
    """Bytes that never were a message."""
    nested = b""
    while len(nested) < 120:
        nested = bytes([rng.choice((0x0A, 0x12, 0x1A)), len(nested)]) + nested
    endless = b"\x08" + b"\xff" * rng.choice((9, 10, 11, 100))  # a varint
    groups = b"\x0b" * rng.choice((10, 101, 5000))  # each in the one before, never closed
    numbers = [x for f in range(1, 12) for x in (f << 3 | rng.choice((0, 5, 7)), 1, 0, 0, 0)]
    noise = rng.randbytes(rng.choice((1, 5, 40, 1000)))
    return rng.choice((nested, endless, groups, bytes(numbers), noise))
