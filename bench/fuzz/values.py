"""Bad values: at the edges of their types, in any field of any message, and bytes that are none."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

U32 = (0, 1, 2, 7, 15, 63, 64, 65, 255, 1024, 4095, 4096, 4097, 1 << 16, 1 << 20,
       (1 << 31) - 1, 1 << 31, (1 << 32) - 1)  # fmt: skip
U64 = (*U32, (1 << 63) - 1, 1 << 63, (1 << 64) - 2, (1 << 64) - 1)
I32 = (0, 1, 2, 3, 7, 99, -1, (1 << 31) - 1, -(1 << 31))
REALS = (0.0, -0.0, 1.0, -1.0, 0.3, 0.5, 2.0, 1e-3, 9e-4, 100.0, 101.0, 1e-300, 5e-324, 1e38,
         -1e38, math.nan, math.inf, -math.inf)  # fmt: skip
TEXTS = ("", "a", "exact", "fly", "fuzzy", "rejection", "model", "prompt_lookup", "multi_level",
         "é😀", "\0", "a\nb", "%s%n{}", "../../etc/passwd", "\u202e", "x" * 65, "y" * 5000,
         "[::1]:1", "dns:///x:y")  # fmt: skip
BLOBS = (b"", b"\0", b"\xff", b"\0\x7e" * 3, b"\0\x80" * 8, bytes(range(256)))

_KINDS: dict[int, Callable[[Random], Any]] = {
    FieldDescriptor.CPPTYPE_INT32: lambda rng: rng.choice(I32),
    FieldDescriptor.CPPTYPE_INT64: lambda rng: rng.choice(I32),
    FieldDescriptor.CPPTYPE_UINT32: lambda rng: rng.choice(U32),
    FieldDescriptor.CPPTYPE_UINT64: lambda rng: rng.choice(U64),
    FieldDescriptor.CPPTYPE_DOUBLE: lambda rng: rng.choice(REALS),
    FieldDescriptor.CPPTYPE_FLOAT: lambda rng: rng.choice(REALS),
    FieldDescriptor.CPPTYPE_BOOL: lambda rng: rng.random() < 0.5,
    FieldDescriptor.CPPTYPE_ENUM: lambda rng: rng.choice(I32),
}


def edge(field: FieldDescriptor, rng: Random) -> Any:
    """A value at the edge of a scalar field's type."""
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return rng.choice(BLOBS if field.type == FieldDescriptor.TYPE_BYTES else TEXTS)
    return _KINDS[field.cpp_type](rng)


def mutate(message: Message, rng: Random) -> None:
    """Change one field, somewhere in the message or in those that it holds."""
    field = rng.choice(_fields(message, rng))
    if field.is_repeated:
        _mutate_list(message, field, rng)
    elif field.message_type is None:
        setattr(message, field.name, edge(field, rng))
    elif rng.random() < 0.1:
        message.ClearField(field.name)
    else:
        inner = getattr(message, field.name)
        inner.SetInParent()
        if field.message_type.fields:
            mutate(inner, rng)


def _fields(message: Message, rng: Random) -> list[Any]:
    """What may be changed: mostly what is there, so that a message stays nearly what it was."""
    there: list[Any] = [field for field, _ in message.ListFields()]
    return there if there and rng.random() < 0.7 else list(message.DESCRIPTOR.fields)


def _mutate_list(message: Message, field: FieldDescriptor, rng: Random) -> None:
    values = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        for _ in range(rng.choice((1, 1, 3, 2000))):
            number = rng.randrange(1 << 32) if rng.random() < 0.5 else edge(key, rng)
            values[number] = edge(value, rng)
        return
    how = rng.random()
    if how < 0.15 or (not values and how < 0.3):
        message.ClearField(field.name)
    elif field.message_type is not None:
        if values and how < 0.7:
            mutate(rng.choice(list(values)), rng)
        else:
            values.add()
    elif how < 0.5 and values:
        values[rng.randrange(len(values))] = edge(field, rng)
    elif how < 0.6:
        values.extend(list(values) * rng.choice((1, 3, 40)))
    else:
        values.extend(edge(field, rng) for _ in range(rng.choice((1, 1, 2, 100))))


def mangle(data: bytes, rng: Random) -> bytes:
    """Bytes that were a message, and may still be one."""
    buffer = bytearray(data or b"\x0a\x00")
    at = rng.randrange(len(buffer))
    match rng.randrange(10):
        case 0:
            for _ in range(rng.randint(1, 6)):
                buffer[rng.randrange(len(buffer))] ^= 1 << rng.randrange(8)
        case 1:
            del buffer[at:]
        case 2:
            buffer[at:at] = rng.randbytes(rng.randint(1, 12))
        case 3:
            del buffer[at : at + rng.randint(1, 8)]
        case 4:
            buffer[at:at] = buffer[rng.randrange(len(buffer)) :]
        case 5:
            buffer += bytes(buffer)
        case 6:
            return junk(rng)
        case 7:
            buffer += junk(rng)
        case 8:  # a length that reaches far beyond the end
            buffer[at:at] = b"\x0a" + _varint(rng.choice((1 << 20, (1 << 31) - 1, (1 << 63) - 1)))
        case _:
            buffer[at:] = rng.randbytes(len(buffer) - at)
    return bytes(buffer)


def junk(rng: Random) -> bytes:
    """Bytes that never were a message."""
    match rng.randrange(8):
        case 0:
            return rng.randbytes(rng.choice((1, 2, 5, 40, 1000)))
        case 1:  # groups in groups, without end
            return b"\x0b" * rng.choice((10, 101, 5000))
        case 2:  # messages in messages
            return _nested(rng.choice((1, 2, 3)), rng.choice((5, 60, 200)))
        case 3:  # a varint without end
            return b"\x08" + b"\xff" * rng.choice((9, 10, 11, 100))
        case 4:  # field number 0, and wire types that do not exist
            return bytes(rng.choice((0x00, 0x06, 0x07, 0x0E, 0x0F)) for _ in range(4))
        case 5:  # text that is no UTF-8
            return b"\x0a\x04\xff\xfe\xed\xa0" + b"\x22\x02\xc3\x28"
        case 6:
            return b"\x0a" + _varint((1 << 32) - 1) + b"\0" * rng.randint(0, 50)
        case _:  # numbers where messages are expected, and the other way round
            return bytes(x for f in range(1, 12) for x in (f << 3 | rng.choice((0, 5)), 1, 0, 0, 0))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _nested(number: int, depth: int) -> bytes:
    data = b""
    for _ in range(depth):
        data = bytes([number << 3 | 2]) + _varint(len(data)) + data
    return data


def halves(*values: float) -> bytes:
    """Little-endian half floats, as distributions hold them."""
    return struct.pack(f"<{len(values)}e", *values)


# --- wrong values of what several services are asked ---------------------------------------------

_BAD_SAMPLING = {
    "temperature": (-1.0, math.nan, math.inf, 1e-9, 1e9),
    "top_p": (0.0, -0.5, 1.5, math.nan),
    "min_p": (-0.1, 1.1, math.nan),
    "repetition_penalty": (0.0, -1.0, 11.0, math.nan, math.inf),
    "presence_penalty": (2.5, -2.5, math.nan),
    "frequency_penalty": (2.5, -2.5, -math.inf, math.nan),
    "top_k": (1 << 31, (1 << 32) - 1),
}


def spoil_sampling(sampling: Any, rng: Random) -> None:
    """Set a sampling parameter out of range."""
    name = rng.choice(list(_BAD_SAMPLING))
    setattr(sampling, name, rng.choice(_BAD_SAMPLING[name]))


def spoil_bias(bias: Any, vocab_size: int, rng: Random) -> None:
    """Add biases out of range, of tokens that do not exist, or too many."""
    match rng.randrange(3):
        case 0:
            bias[5] = rng.choice((math.nan, math.inf, 101.0))
        case 1:
            bias[vocab_size] = 1.0
        case _:
            for token in range(rng.choice((1025, 20_000))):
                bias[token] = 1.0


def spoil_rule(rule: Any, names: Sequence[str], vocab_size: int, rng: Random) -> None:
    """Give a rule a name that is none (of `names`, or worse), or parameters that do not fit."""
    rule.Clear()
    rule.name = "fly"
    match rng.randrange(7):
        case 0:
            rule.name = rng.choice((*names, "\0", "z" * 100_000))
        case 1:
            rule.fly_entropy_threshold = rng.choice((math.nan, -1.0, math.inf))
        case 2:
            rule.entropy_measure = rng.choice((3, 99, -1))
        case 3:
            rule.name, rule.margin_threshold = "exact", 0.3
        case 4:
            rule.fly_window_size = rng.choice((1025, (1 << 32) - 1))
        case 5:
            rule.name, rule.divergence_top_k = "fuzzy", (1 << 32) - 1
        case _:
            count = rng.choice((1, 1025, 100_000))
            rule.guarded_token_ids.extend([vocab_size if count == 1 else 5] * count)
