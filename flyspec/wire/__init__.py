"""Protobuf messages to our values and back: the only package that knows the fields of both.

What protobuf cannot rule out (an unknown enum number, a missing oneof) is refused here with
`InvalidArgumentError`. Ranges are the receiving service's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from flyspec.errors import InvalidArgumentError
from flyspec.v1 import draft_pb2, verify_pb2
from flyspec.values.admin import TokenizerBundle, TokenizerFacts
from flyspec.wire.messages import CODEC, ONE_OF, PLACES

TOKENIZER_CHUNK_BYTES = 1 << 20

T = TypeVar("T")


class _Encoders(dict[type, Callable[[Any], Any]]):
    """From a value to its message, by the value's class."""

    def __missing__(self, cls: type) -> Callable[[Any], Any]:
        if cls not in PLACES:
            raise TypeError(f"{cls.__name__} is no message")
        make, name = PLACES[cls]
        descriptor = make.DESCRIPTOR
        if name:
            write, _ = CODEC.pair(cls, descriptor.fields_by_name[name].message_type)
            self[cls] = lambda value: make(**{name: write(value)})
        else:
            write, _ = CODEC.pair(cls, descriptor)
            self[cls] = lambda value: make(**write(value))
        return self[cls]


class _Decoders(dict[tuple[type, Any], Callable[..., Any]]):
    """From a message to a value, by the classes of both."""

    def __missing__(self, key: tuple[type, Any]) -> Callable[..., Any]:
        cls, make = key
        self[key] = CODEC.pair(cls, make.DESCRIPTOR)[1]
        return self[key]


_ENCODERS, _DECODERS = _Encoders(), _Decoders()


def encode(value: Any) -> Any:
    """The message that goes over the wire for a value; if need be, one that holds it.

    Raises ValueError or TypeError for what a field cannot hold.
    """
    return _ENCODERS[type(value)](value)


def decode(cls: type[T], message: Any, **local: Any) -> T:
    """The value that a message stands for, with the fields of it that do not travel.

    Raises `InvalidArgumentError`.
    """
    value: T = _DECODERS[cls, type(message)](message, **local)
    return value


def unwrap(message: Any) -> Any:
    """The value in a message that holds one of several. Raises `InvalidArgumentError`."""
    oneof, held = ONE_OF[type(message)]
    name = message.WhichOneof(oneof)
    if name is None:
        raise InvalidArgumentError(
            f"{message.DESCRIPTOR.name}.{oneof}: set one of {', '.join(held)}"
        )
    cls, value = held[name], getattr(message, name)
    return value if cls is bytes else _DECODERS[cls, type(value)](value)


def tokenizer_messages(bundle: TokenizerBundle) -> list[verify_pb2.GetTokenizerResponse]:
    """A tokenizer as the messages of `GetTokenizer`, metadata first."""
    return [encode(bundle), *_chunks(verify_pb2.GetTokenizerResponse, bundle)]


def add_tokenizer_messages(
    bundle: TokenizerBundle, vocab_size: int
) -> list[draft_pb2.AddTokenizerRequest]:
    """A target's tokenizer as the messages of `AddTokenizer`, facts first.

    `vocab_size` is that of the target's output layer.
    """
    facts = TokenizerFacts(
        bundle.fingerprint, bundle.eos_token_ids, bundle.control_token_ids, vocab_size
    )
    return [encode(facts), *_chunks(draft_pb2.AddTokenizerRequest, bundle)]


def _chunks(make: Any, bundle: TokenizerBundle) -> list[Any]:
    data, size = bundle.tokenizer_json, TOKENIZER_CHUNK_BYTES
    return [make(tokenizer_json_chunk=data[i : i + size]) for i in range(0, len(data), size)]


def tokenizer_of(messages: Sequence[verify_pb2.GetTokenizerResponse]) -> TokenizerBundle:
    """The tokenizer in the messages of `GetTokenizer`."""
    if not messages or messages[0].WhichOneof("response") != "metadata":
        raise InvalidArgumentError("GetTokenizerResponse.response: metadata must come first")
    data = b"".join(message.tokenizer_json_chunk for message in messages[1:])
    return decode(TokenizerBundle, messages[0].metadata, tokenizer_json=data)
