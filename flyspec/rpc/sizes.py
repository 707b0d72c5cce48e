"""Limits on message sizes, parts of a message, list lengths and calls per connection."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from operator import attrgetter
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from flyspec.errors import InvalidArgumentError
from flyspec.json_text import MAX_PARTS

MAX_MESSAGE_BYTES = 32 << 20
# A chunk of distributions or of a tokenizer has about one megabyte.
BASE_REQUEST_BYTES = 3 << 20
MAX_ID_BYTES = 5
MAX_STREAMS = 1024
"""Default maximum of concurrent calls per connection; more wait at the client."""


def max_streams(max_sessions: int) -> int:
    """Return the maximum of concurrent calls per connection to a service with that many sessions.

    More than there are sessions, so that a full service answers instead of leaving calls waiting.
    Far more, since grpc.aio keeps a stream until its connection closes if a write failed while
    responses were unread.
    """
    return max(MAX_STREAMS, 2 * max_sessions)


def max_request_bytes(max_length: int) -> int:
    """Return the maximum request size for sequences of up to `max_length` tokens."""
    return min(MAX_MESSAGE_BYTES, BASE_REQUEST_BYTES + MAX_ID_BYTES * max_length)


Lengths = Mapping[str, tuple[int, str]]
"""Maximum length of each list, by its path in the message, and the error text for more."""


def check_request_lengths(request: Any, limits: Mapping[str, Lengths]) -> None:
    """Run `check_lengths` on the set member of a request's oneof."""
    for name, lengths in limits.items():
        if request.HasField(name):
            check_lengths(getattr(request, name), lengths, f"{name}.")


def check_lengths(message: Any, limits: Lengths, within: str) -> None:
    """Refuse long lists before they are read, which takes several times their memory.

    `within` is prefixed to paths in errors. Raises `InvalidArgumentError`.
    """
    for path, (most, objection) in limits.items():
        if (size := len(attrgetter(path)(message))) > most:
            raise InvalidArgumentError(f"{within}{path}: {size} {objection}")


def check_parts(data: bytes, descriptor: Descriptor) -> None:
    """Refuse a message of more than `MAX_PARTS` parts before it is parsed.

    Parsing some megabytes of empty messages keeps all threads waiting for 0.2 s. Raises
    `InvalidArgumentError`.
    """
    count, rest = 0, [(0, len(data), descriptor)]
    while rest:
        start, end, message = rest.pop()
        for number, begin, past in _fields(data, start, end):
            count += 1
            if count > MAX_PARTS:
                raise InvalidArgumentError(
                    f"the request has more than {MAX_PARTS} fields, those of its messages included;"
                    " send fewer at a time"
                )
            field = message.fields_by_number.get(number)
            if field is not None and field.message_type is not None:
                rest.append((begin, past, field.message_type))


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, begin and end of each field's value, up to where parsing fails."""
    with suppress(IndexError):
        while at < end:
            tag, begin = _varint(data, at)
            at = begin
            match tag & 7:
                case 0:
                    _, at = _varint(data, begin)
                case 1:
                    at += 8
                case 2:
                    size, begin = _varint(data, begin)
                    at = begin + size
                case 5:
                    at += 4
            yield tag >> 3, begin, min(end, at)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number and where it ends. Raises IndexError if it does not."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise IndexError


def check_lists(
    request: Any, limits: Mapping[str, int], others: int, descriptor: Descriptor, where: str = ""
) -> None:
    """Refuse long lists, however deep in a message or its JSON form, before they are converted.

    `limits` are by the field's name, `others` is that of all other lists; `where` begins the paths
    in errors. Raises `InvalidArgumentError`.
    """
    for field, value in _given(request, descriptor):
        path, parts = where + field.name, [value]
        if field.is_repeated and hasattr(value, "__len__") and not isinstance(value, str):
            most = limits.get(field.name, others)
            if len(value) > most:
                raise InvalidArgumentError(f"{path}: at most {most} allowed, got {len(value)}")
            parts = value
        kind = field.message_type
        if kind is not None and not kind.GetOptions().map_entry:
            for index, part in enumerate(parts):
                place = f"[{index}]" if field.is_repeated else ""
                check_lists(part, limits, others, kind, f"{path}{place}.")


def _given(request: Any, descriptor: Descriptor) -> Iterable[tuple[FieldDescriptor, Any]]:
    """Return the set fields of a message, or of its JSON form, with their values."""
    if not isinstance(request, Mapping):
        return request.ListFields() if hasattr(request, "ListFields") else ()
    return [
        (field, request[name])
        for field in descriptor.fields
        for name in (field.name, field.json_name)
        if name in request
    ]
