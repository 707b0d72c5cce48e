"""Scripts: calls to a server made from valid sessions by random changes, and what may end them.

Changes come from the descriptors of messages, and so does what is known to be wrong. To the client
every call is a stream, whatever its method is, so a method of one request may get none or two. A
script does not depend on what the server answers, so it can be played again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor, FileDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from flyspec.flags import flags_of
from flyspec.ranges import Range
from flyspec.rules import PARAMETERS
from flyspec.v1 import admin_pb2, generation_pb2
from flyspec.values.requests import GenerateOptions
from flyspec.values.tokens import SamplingParams
from loadtest.fuzz.sessions import FILES, Facts, Session, sessions

RANGES: dict[str, Sequence[Range]] = {
    **{n: (p.ranges[None],) for n, p in PARAMETERS.items() if None in p.ranges},
    **{n: (flag.range,) for owner in (SamplingParams, GenerateOptions)
       for n, (_, flag) in flags_of(owner).items() if flag.range},
}  # fmt: skip
"""The declared ranges of fields, by name, that hold whatever the other fields are."""
INTEGERS = (0, 1, 2, 3, 15, 64, 65, 255, 1025, 1 << 20, (1 << 20) + 1, -1, (1 << 31) - 1, 1 << 31,
            -1 << 31, (1 << 32) - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)  # fmt: skip
REALS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-9, 101.0, 5e-324, 1e38, math.nan, math.inf, -math.inf)
TEXTS = ("", "a", "\0", "é😀" * 30, "%s%n{}", "../../etc/passwd", "\u202e", "x" * 65, "y" * 100_000,
         "Żółć " * 4000, "[::1]:1", "127.0.0.1:99999", "127.0.0.1:1", "ftp://x:1")  # fmt: skip
HALVES = (b"\x00\x7e", b"\x00\xfc", b"\x00\xbc")
"""Half floats, of which distributions consist: NaN, -inf, -1."""
BLOBS = (b"", b"{}", b"[" * 10_000, b"\x80", bytes(range(256)), *HALVES)
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
"""Files whose ids are those of targets, which have no `NO_ID`."""
MAX_ENTRIES, MAX_MESSAGES = (1 << 20) + 1, 5000
EMPTY = {FieldDescriptor.TYPE_STRING: "", FieldDescriptor.TYPE_BYTES: b""}
WRONG = 0.4
"""Share of changes to a value that is known to be wrong, if there are such."""
REFUSED = frozenset({"INVALID_ARGUMENT", "FAILED_PRECONDITION", "NOT_FOUND", "OUT_OF_RANGE",
                     "ALREADY_EXISTS", "UNIMPLEMENTED"})  # fmt: skip
BLAMELESS = REFUSED | {"OK", "CANCELLED", "DEADLINE_EXCEEDED"}
"""Statuses that do not blame the server, whatever the client did."""
WRITE_RACE = "ended while written to"
"""grpc.aio overwrites a status when a write meets the end (grpc/grpc#36066)."""
KINDS = {
    "valid": 8, "an unknown field added": 4, "fields changed": 54, "bytes changed": 14,
    "a message dropped": 2, "a message doubled": 4, "messages reordered": 3,
    "mixed with another session": 3, "cut short": 2, "cancelled": 4, "its deadline passes": 2,
}  # fmt: skip
"""Changes to a session, by frequency."""
OWN_WEIGHT = 4
"""Frequency of a field of the server's own methods, as a multiple of one of gRPC's."""
MAX_TOKENS, MAX_WAIT_MS, PATIENCE_S, PAUSE_S = 50, 200, 3.0, 0.005
"""Bounds of what a request may cost, so that nobody waits long for one that is valid."""
Path = tuple[Any, ...]
"""Fields, each of the message before it."""


# --- messages ---------------------------------------------------------------------------------


def is_map(field: Any) -> bool:
    return bool(field.message_type and field.message_type.GetOptions().map_entry)


def paths(kind: Any, above: Path = ()) -> Iterator[Path]:
    """Yield the path of every field of a message, by its descriptor, and of the messages in it."""
    for field in kind.fields:
        yield (*above, field)
        if field.message_type and not is_map(field) and field not in above:
            yield from paths(field.message_type, (*above, field))


def mistake(message: Message) -> str:
    """Return what no server may accept, whatever its state; empty if nothing is known to be wrong.

    NaN, a number that the enum does not have, one outside the field's declared range, and an id
    that is in no target's vocabulary.
    """
    for field, value in message.ListFields():
        values = value.values() if is_map(field) else value if field.is_repeated else [value]
        for one in values:
            if isinstance(one, Message):
                if found := mistake(one):
                    return found
            elif is_wrong(field, one):
                return f"{field.name} is {one}"
    return ""


def is_wrong(field: Any, value: Any) -> bool:
    """Return true if no server may accept this value in the field."""
    if isinstance(value, float) and math.isnan(value):
        return True
    if field.enum_type:
        return value not in field.enum_type.values_by_number
    if value == NO_ID and field.name.endswith("ids"):
        return field.file.name in TARGETS
    known = () if field.is_repeated else RANGES.get(field.name, ())
    return bool(known) and not any(value in one for one in known)


class Mutator:
    """Changes messages. `numbers` and `texts` mean something to the server, such as its limits."""

    def __init__(self, numbers: Sequence[int], texts: Sequence[str]) -> None:
        self._numbers = (*INTEGERS, *(n + d for n in numbers for d in (-1, 0, 1)))
        self._sizes = [n for n in self._numbers if 0 <= n <= MAX_ENTRIES]
        self._texts = (*TEXTS, *texts)

    def change(self, message: Any, path: Path, rng: Random) -> None:
        """Change the field at a path; messages on the way are added where they are missing."""
        for field in path[:-1]:
            inside = getattr(message, field.name)
            if not field.is_repeated:
                inside.SetInParent()  # of a oneof, this clears the member that was set
                message = inside
            else:
                message = rng.choice(inside) if inside else inside.add()
        field = path[-1]
        now = getattr(message, field.name)
        if is_map(field):
            key, value = field.message_type.fields
            for _ in range(rng.choice((1, 1, 1, 2000))):
                now[rng.choice((rng.randrange(5000), self._value(key, 0, rng)))] = self._value(
                    value, 1.0, rng
                )
        elif field.is_repeated:
            self._change_list(now, field, rng)
        elif field.has_presence and message.HasField(field.name) and rng.random() < 0.3:
            message.ClearField(field.name)
        elif field.message_type is None:
            setattr(message, field.name, self._value(field, now, rng))
        else:
            now.Clear()
            now.SetInParent()

    def _value(self, field: Any, now: Any, rng: Random) -> Any:
        """Return a value of the field's type; often one that is known to be wrong."""
        values = self._values(field, now)
        wrong = [value for value in values if is_wrong(field, value)]
        return rng.choice(wrong if wrong and rng.random() < WRONG else values)

    def _values(self, field: Any, now: Any) -> Sequence[Any]:
        """Return values at edges of the type or range, known to the server, or near the one now."""
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
        return (*BLOBS, now[2:], now[:-1], *(now[:-2] + half for half in HALVES), now + HALVES[2])

    def _change_list(self, values: Any, field: Any, rng: Random) -> None:
        """Change, add, drop, double or shuffle entries, or make the list empty or very long."""
        how = rng.randrange(8)
        if how < 4 or not values:
            if field.message_type:
                values.add()
            elif how < 2 and values:
                at = rng.randrange(len(values))
                values[at] = self._value(field, values[at], rng)
            else:
                values.append(self._value(field, EMPTY.get(field.type, 0), rng))
            return
        entries = [deepcopy(value) for value in values]
        if how == 4:
            del entries[rng.randrange(len(entries))]
        elif how == 5:
            rng.shuffle(entries)
        else:
            size = 2 * len(entries) if how == 6 else rng.choice(self._sizes)
            size = min(size, MAX_MESSAGES) if field.message_type else size
            entries = (entries * (size // len(entries) + 1))[:size]
        del values[:]
        values.extend(entries)


def readable(cls: type[Message], data: bytes) -> Any:
    """Return the message that the bytes are; None if they are none."""
    try:
        return cls.FromString(data)
    except Exception:  # protobuf raises several kinds
        return None


def mangled(data: bytes, other: bytes, rng: Random) -> bytes:
    """Return bytes that were a message, and may still be one; `other` is another message."""
    at, length = rng.randrange(len(data) + 1), rng.randint(1, 8)
    before, after = data[:at], data[at:]
    flipped = bytes([byte ^ 1 << rng.randrange(8) for byte in after[:1]])
    return rng.choice((
        before,
        before + flipped + after[1:],
        before + b"\xff" + after[1:],  # text is not UTF-8 any more
        before + after[length:],
        before + rng.randbytes(length) + after,
        before + b"\x0a\xff\xff\xff\xff\x07" + after,  # a length far beyond the end
        data + other,  # fields that are there twice, the later one in force
        b"\x08" + b"\xff" * rng.choice((9, 10, 11, 100)),  # an endless varint
        b"\x0b" * rng.choice((10, 101, 5000)),  # groups, each in the one before, never closed
        rng.randbytes(rng.choice((1, 5, 40, 1000))),
    ))  # fmt: skip


# --- calls ------------------------------------------------------------------------------------


class Method(NamedTuple):
    """A method of a service, which takes a stream of requests or one."""

    path: str
    request: type[Message]
    response: type[Message]
    streams: bool


def methods_of(*files: FileDescriptor) -> list[Method]:
    """Return the methods of all services in these files."""
    return [
        Method(f"/{service.full_name}/{method.name}", GetMessageClass(method.input_type),
               GetMessageClass(method.output_type), method.client_streaming)
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods
    ]  # fmt: skip


SYSTEM = methods_of(health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
NOWHERE = SYSTEM[0]._replace(path="/flyspec.v1.Nothing/At/All")


@dataclass(frozen=True)
class Script:
    """A call: its messages, and the statuses that are `allowed`.

    The client waits `pause_s` after each, and reads the answers in the end, unless it has
    `cancelled`. `deadline_s` is its own, if it has one.
    """

    method: Method
    kind: str
    messages: Sequence[bytes]
    allowed: frozenset[str] = BLAMELESS
    pause_s: float = 0.0
    deadline_s: float | None = None
    cancelled: bool = False

    @cached_property
    def expects(self) -> frozenset[str]:
        """The statuses that may end it; of what is known to be wrong, refusals."""
        late = {"DEADLINE_EXCEEDED"} if self.deadline_s is not None else set()
        sent = [readable(self.method.request, message) for message in self.messages]
        heard = sent if self.method.streams else sent[:1]
        wrong = any(message is None or mistake(message) for message in heard)
        refused = wrong and not self.cancelled
        return (REFUSED if refused else self.allowed) | late | {"RESOURCE_EXHAUSTED", WRITE_RACE}

    def __str__(self) -> str:
        deadline = "" if self.deadline_s is None else f", deadline {self.deadline_s} s"
        lines = [f"  {self.method.path}: {self.kind}{', cancelled' * self.cancelled}{deadline}"]
        for data in self.messages:
            sent = readable(self.method.request, data)
            text = data.hex() if sent is None else " ".join(str(sent).split())
            lines.append(f"  send {text[:300]}{' ...' if len(text) > 300 else ''}")
        return "\n".join(lines)


class ScriptSource:
    """Makes scripts for the server of this name: sessions of its methods, changed."""

    def __init__(self, name: str, facts: Facts) -> None:
        known, self._own = list(sessions(name, facts)), methods_of(FILES[name])
        self.sessions: dict[Method, list[Session]] = {
            method: [s for s in known if isinstance(s[0], method.request)] or [[method.request()]]
            for method in (*self._own, *SYSTEM, NOWHERE)
        }
        self._paths = {method: list(paths(method.request.DESCRIPTOR)) for method in self.sessions}
        self._weights = [
            max(1, len(known)) * (OWN_WEIGHT if method in self._own else 1)
            for method, known in self._paths.items()
        ]
        numbers = (facts.vocab_size, facts.context_length, facts.max_drafts)
        self._mutator = Mutator(numbers, (*facts.rules, *facts.drafters))
        # An operator's request meets whatever state others left, and drafters that do not answer.
        self._by_state = frozenset({"UNAVAILABLE"} if name == "admin" else ())

    def script(self, rng: Random) -> Script:
        """Return the script that this generator leads to."""
        (method,) = rng.choices([*self.sessions], self._weights)
        (kind,) = rng.choices([*KINDS], [*KINDS.values()])
        session, own = rng.choice(self.sessions[method]), method in self._own
        other = rng.choice(self.sessions[method])
        data, at = [message.SerializeToString() for message in session], rng.randrange(len(session))
        allowed = BLAMELESS | self._by_state
        deadline_s = 0.2 if method.path.endswith("/Watch") else None
        match kind:
            case "valid" | "an unknown field added":
                if not self._by_state:  # grpc's own services do not implement everything
                    allowed = frozenset({"OK"} if own else {"OK", "UNIMPLEMENTED"})
                if kind != "valid":
                    data[at] += rng.choice(UNKNOWN)
            case "fields changed":
                data[at] = self._changed(method, data[at], rng)
            case "bytes changed":
                data[at] = mangled(data[at], other[-1].SerializeToString(), rng)
            case "a message dropped":
                del data[at]
            case "a message doubled":
                data.insert(at, data[at])
            case "messages reordered":
                rng.shuffle(data)
            case "mixed with another session":
                data[at] = other[at % len(other)].SerializeToString()
            case "its deadline passes":
                deadline_s = rng.choice((0.001, 0.01, 0.05))
            case _:  # cut short, or cancelled
                del data[at + 1 :]
        # A session's messages come once and in order, the opening first.
        wrong = kind == "a message doubled" or (kind == "a message dropped" and data and not at)
        if wrong and method.streams and own:
            allowed = REFUSED
        bounded = [_affordable(method, message, rng) for message in data]
        if deadline_s is None and any(costly for _, costly in bounded):
            deadline_s = PATIENCE_S
        return Script(
            method, kind, [message for message, _ in bounded],
            allowed,
            rng.choice((0.0, PAUSE_S)), deadline_s, kind == "cancelled",
        )  # fmt: skip

    def _changed(self, method: Method, data: bytes, rng: Random) -> bytes:
        message, known = method.request.FromString(data), self._paths[method]
        for _ in range(rng.choice((1, 1, 1, 2, 4)) if known else 0):
            self._mutator.change(message, rng.choice(known), rng)
        return message.SerializeToString()


def _affordable(method: Method, data: bytes, rng: Random) -> tuple[bytes, bool]:
    """Return a message that ends no run and takes little time, and whether it may take long."""
    match message := readable(method.request, data):
        case generation_pb2.GenerateRequest():
            if message.HasField("max_tokens") and message.max_tokens <= MAX_TOKENS:
                return data, False
            if rng.random() < 0.1:
                return data, True
            message.max_tokens = 3
        case admin_pb2.RegisterDrafterRequest():  # its address may lead nowhere
            return data, True
        case admin_pb2.DrainDrafterRequest() if message.wait_ms > MAX_WAIT_MS:
            message.wait_ms = MAX_WAIT_MS
        case admin_pb2.DrainRequest():
            message.resume = True
        case _:
            return data, False
    return message.SerializeToString(), False
