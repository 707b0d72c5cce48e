"""Changes to messages and their bytes, and what is known to be a mistake, from descriptors."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from copy import deepcopy
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from flyspec.flags import flags_of
from flyspec.ranges import Range
from flyspec.rules import PARAMETERS
from flyspec.values.requests import GenerateOptions
from flyspec.values.tokens import SamplingParams

RANGES: dict[str, Sequence[Range]] = {
    **{n: tuple(p.ranges.values()) for n, p in PARAMETERS.items() if p.ranges},
    **{n: (flag.range,) for owner in (SamplingParams, GenerateOptions)
       for n, (_, flag) in flags_of(owner).items() if flag.range},
}  # fmt: skip
"""The declared ranges of fields, by name; a value must be in one of them."""

INTEGERS = (0, 1, 2, 3, 15, 64, 65, 255, 1024, 1025, 1 << 16, 1 << 20, (1 << 20) + 1, -1,
            (1 << 31) - 1, 1 << 31, -1 << 31, (1 << 32) - 1, (1 << 63) - 1, 1 << 63,
            (1 << 64) - 1)  # fmt: skip
REALS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-9, 101.0, 5e-324, 1e38, -1e38, math.nan, math.inf,
         -math.inf)  # fmt: skip
TEXTS = ("", "a", "a b", "\0", "é😀" * 30, "%s%n{}", "../../etc/passwd", "\u202e", "x" * 65,
         "y" * 100_000, "Żółć " * 4000, "[::1]:1", "127.0.0.1:99999", "127.0.0.1:1", "unix:///x",
         "dns:///", "ftp://x:1")  # fmt: skip
BLOBS = (b"", b"{}", b"[" * 10_000, b"\x80", bytes(range(256)))
HALVES = (math.nan, math.inf, -math.inf, 1.0, -1.0, 65504.0)
"""Half floats, which distributions consist of."""
WIDTHS = {
    FieldDescriptor.CPPTYPE_INT32: Range(-1 << 31, (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: Range(-1 << 63, (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: Range(0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: Range(0, (1 << 64) - 1),
}
UNKNOWN = (b"\xc0\xb8\x02\x07", b"\xc1\xb8\x02" + bytes(8), b"\xc2\xb8\x02\x02\xff\xff")
"""Fields of number 5000, which no message has: a varint, 64 bits, bytes."""
NO_ID = (1 << 32) - 1
TARGETS = ("flyspec/v1/verify.proto", "flyspec/v1/generation.proto")
"""Where ids are those of targets, which have no `NO_ID`."""
MAX_ENTRIES, MAX_MESSAGES = (1 << 20) + 1, 5000
WRONG = 0.4
"""How often a value is one that is known to be wrong, if there are such."""


def is_map(field: Any) -> bool:
    """Whether the field is a map."""
    return bool(field.message_type and field.message_type.GetOptions().map_entry)


def parts(message: Message, field: Any) -> Sequence[Message]:
    """The messages that a field holds."""
    if field.message_type is None or is_map(field):
        return ()
    value = getattr(message, field.name)
    return value if field.is_repeated else [value] * message.HasField(field.name)


def places(message: Message) -> Iterator[tuple[Message, Any]]:
    """Every field of a message and of the messages in it; of a list, of its first message."""
    for field in message.DESCRIPTOR.fields:
        yield message, field
        for part in parts(message, field)[:1]:
            yield from places(part)


def mistake(message: Message) -> str:
    """What no server may accept, whatever its state; empty if nothing is known to be wrong.

    NaN, a number that the enum does not have, one outside the field's declared range, and an id
    that is in no target's vocabulary.
    """
    for field, value in message.ListFields():
        if found := next(filter(None, map(mistake, parts(message, field))), ""):
            return found
        for one in value.values() if is_map(field) else value if field.is_repeated else [value]:
            if is_wrong(field, one):
                return f"{field.name} is {one}"
    return ""


def is_wrong(field: Any, value: Any) -> bool:
    """Whether no server may accept this value in the field."""
    if isinstance(value, float) and math.isnan(value):
        return True
    if field.enum_type:
        return value not in field.enum_type.values_by_number
    if value == NO_ID and field.name.endswith("ids"):
        return field.file.name in TARGETS
    known = () if field.is_repeated else RANGES.get(field.name, ())
    return bool(known) and not any(value in one for one in known)


_EMPTY = {FieldDescriptor.TYPE_STRING: "", FieldDescriptor.TYPE_BYTES: b""}


class Mutator:
    """Changes messages. `numbers` and `texts` mean something to the server, such as its limits."""

    def __init__(self, numbers: Sequence[int], texts: Sequence[str]) -> None:
        self._numbers = (*INTEGERS, *(n + d for n in numbers for d in (-1, 0, 1)))
        self._sizes = [n for n in self._numbers if 0 <= n <= MAX_ENTRIES]
        self._texts = (*TEXTS, *texts)

    def change(self, message: Message, rng: Random, place: int | None = None) -> None:
        """Change the field at this index of the message's `places`, or at a random one."""
        found = list(places(message))
        if not found:
            return
        owner, field = rng.choice(found) if place is None else found[place]
        now = getattr(owner, field.name)
        if is_map(field):
            key, value = field.message_type.fields
            for _ in range(rng.choice((1, 1, 1, 2000))):
                number = rng.choice((rng.randrange(5000), self._value(key, 0, rng)))
                now[number] = self._value(value, 1.0, rng)
        elif field.is_repeated:
            self._change_list(now, field, rng)
        elif field.has_presence and owner.HasField(field.name) and rng.random() < 0.3:
            owner.ClearField(field.name)
        elif field.message_type is None:
            setattr(owner, field.name, self._value(field, now, rng))
        else:  # of a oneof, this clears the member that was set
            now.Clear()
            now.SetInParent()
            for _ in range(rng.randrange(4)):
                self.change(now, rng)

    def _value(self, field: Any, now: Any, rng: Random) -> Any:
        """A value of the field's type; often one that is known to be wrong."""
        values = self._values(field, now, rng)
        wrong = [value for value in values if is_wrong(field, value)]
        return rng.choice(wrong if wrong and rng.random() < WRONG else values)

    def _values(self, field: Any, now: Any, rng: Random) -> Sequence[Any]:
        """Values at edges of the type or range, known to the server, or near the one now."""
        kind = field.cpp_type
        ends = [end for known in RANGES.get(field.name, ()) for end in (known.low, known.high)]
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return (not now,)
        if kind == FieldDescriptor.CPPTYPE_ENUM:
            return (*field.enum_type.values_by_number, -1, 99, (1 << 31) - 1)
        if kind in WIDTHS:
            near = (int(n) + d for n in (now, *ends) for d in (-1, 1))
            return [n for n in (*self._numbers, *near) if n in WIDTHS[kind]]
        if kind != FieldDescriptor.CPPTYPE_STRING:
            return (*REALS, *ends, *(end * 1.01 for end in ends), now * 2, -now)
        if field.type == FieldDescriptor.TYPE_STRING:
            return (*self._texts, now[1:], now.upper(), now * 40)
        at, half = 2 * rng.randrange(len(now) // 2 + 1), struct.pack("<e", rng.choice(HALVES))
        other, longer = now[:at] + half + now[at + 2 :], now + rng.choice((half, b"\0"))
        return (other, other, now[:at], longer, rng.choice(BLOBS))

    def _change_list(self, values: Any, field: Any, rng: Random) -> None:
        """Change, add, drop, double or shuffle entries, or make the list empty or very long."""
        entries = [deepcopy(value) for value in values]
        message = field.message_type
        if not entries:
            entries = [GetMessageClass(message)() if message else _EMPTY.get(field.type, 0)]
        at, how = rng.randrange(len(entries)), rng.randrange(8)
        if how < 4 or not values:
            if how in (0, 3):
                entries.append(deepcopy(entries[at]))
            if message:
                self.change(entries[at], rng)
            else:
                entries[at] = self._value(field, entries[at], rng)
        elif how == 4:
            del entries[at]
        elif how == 5:
            rng.shuffle(entries)
        elif how == 6:
            entries *= rng.choice((2, 2, 40))
        else:
            size = min(rng.choice(self._sizes), MAX_MESSAGES if message else MAX_ENTRIES)
            entries = (entries * (size // len(entries) + 1))[:size]
        del values[:]
        values.extend(entries)


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
