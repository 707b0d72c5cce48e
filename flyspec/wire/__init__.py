"""Converts values to protobuf messages and back; the only package that knows the fields of both.

What protobuf cannot rule out (an unknown enum number, a missing oneof) raises
`InvalidArgumentError`. Ranges are checked by the receiving service.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from flyspec.errors import InvalidArgumentError
from flyspec.v1 import verify_pb2
from flyspec.values.admin import TokenizerBundle, TokenizerFacts
from flyspec.wire.codec import pair
from flyspec.wire.messages import ENVELOPES, VALUES

TOKENIZER_CHUNK_BYTES = 1 << 20

T = TypeVar("T")


def encode(value: Any) -> Any:
    """Return a value's message, in its envelope if it has one.

    Raises ValueError or TypeError for values that a field cannot hold.
    """
    return _WRITE[type(value)](value)


def decode(cls: type[T], message: Any, **local: Any) -> T:
    """Return a message's value; `local` has fields that are not sent.

    Raises `InvalidArgumentError`.
    """
    return _READ[cls, type(message)](message, **local)  # type: ignore[no-any-return]


def unwrap(message: Any) -> Any:
    """Return the value or bytes in an envelope. Raises `InvalidArgumentError`."""
    oneof, held = _OPEN[type(message)]
    name = message.WhichOneof(oneof)
    if name is None:
        choice = ", ".join(field.name for field in message.DESCRIPTOR.fields)
        raise InvalidArgumentError(f"{message.DESCRIPTOR.name}.{oneof}: set one of {choice}")
    return held[name](getattr(message, name))


class _Lazy(dict[Any, Any]):
    """Makes the value for a key at first use."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make

    def __missing__(self, key: Any) -> Any:
        self[key] = made = self._make(key)
        return made


def _writer(cls: type) -> Callable[[Any], Any]:
    message = next((m for m, told in VALUES.items() if told is cls), None)
    if message is None:
        raise TypeError(f"{cls.__name__} has no message")
    write, _ = pair(cls, message.DESCRIPTOR)
    for envelope in ENVELOPES:
        for field in envelope.DESCRIPTOR.fields:
            if field.message_type is message.DESCRIPTOR:
                return lambda value: envelope(**{field.name: write(value)})
    return lambda value: message(**write(value))


def _opener(envelope: Any) -> tuple[str, _Lazy]:
    (oneof,) = envelope.DESCRIPTOR.oneofs
    told = {message.DESCRIPTOR: cls for message, cls in VALUES.items()}
    held = {field.name: field.message_type for field in oneof.fields}
    return oneof.name, _Lazy(lambda name: pair(told[m], m)[1] if (m := held[name]) else bytes)


_WRITE, _OPEN = _Lazy(_writer), _Lazy(_opener)
_READ = _Lazy(lambda key: pair(key[0], key[1].DESCRIPTOR)[1])


def tokenizer_messages(first: TokenizerBundle | TokenizerFacts, tokenizer_json: bytes) -> list[Any]:
    """Return the messages of `GetTokenizer`, or for `TokenizerFacts` those of `AddTokenizer`."""
    message, size = encode(first), TOKENIZER_CHUNK_BYTES
    starts = range(0, len(tokenizer_json), size)
    chunks = [type(message)(tokenizer_json_chunk=tokenizer_json[i : i + size]) for i in starts]
    return [message, *chunks]


def tokenizer_of(messages: Sequence[verify_pb2.GetTokenizerResponse]) -> TokenizerBundle:
    """Return the tokenizer from the messages of `GetTokenizer`."""
    if not messages or messages[0].WhichOneof("response") != "metadata":
        raise InvalidArgumentError("GetTokenizerResponse.response: metadata must come first")
    data = b"".join(message.tokenizer_json_chunk for message in messages[1:])
    return decode(TokenizerBundle, messages[0].metadata, tokenizer_json=data)
