"""The largest messages, the longest lists in them, and the most calls on one connection."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from flyspec.errors import InvalidArgumentError

MAX_MESSAGE_BYTES = 32 << 20
# A piece of distributions or of a tokenizer has about a megabyte.
BASE_REQUEST_BYTES = 3 << 20
MAX_ID_BYTES = 5
MAX_STREAMS = 1024
"""Calls at once on one connection, if a server does not say otherwise; more wait at the client."""


def max_streams(max_sessions: int) -> int:
    """Calls at once on one connection to a service of so many sessions.

    More than it has sessions: who finds none free is told so, instead of waiting unanswered. And
    many more: grpc.aio keeps a stream for as long as the connection if a write met its end while
    answers were still unread.
    """
    return max(MAX_STREAMS, 2 * max_sessions)


def max_request_bytes(max_length: int) -> int:
    """The largest request to a service whose sequences have at most so many tokens.

    To read a message of many small parts takes a second for some megabytes, and holds up everybody.
    """
    return min(MAX_MESSAGE_BYTES, BASE_REQUEST_BYTES + MAX_ID_BYTES * max_length)


Lengths = Mapping[str, tuple[int, str]]
"""The most entries of a list, by its path in a message, and what to say of more."""


def check_request_lengths(request: Any, limits: Mapping[str, Lengths]) -> None:
    """As `check_lengths` of the message that a request holds, by its name."""
    for name, lengths in limits.items():
        if request.HasField(name):
            check_lengths(getattr(request, name), lengths, f"{name}.")


def check_lengths(message: Any, limits: Lengths, within: str) -> None:
    """Refuse lists before they are read, which costs several times their bytes.

    `within` stands before a path in errors. Raises `InvalidArgumentError`.
    """
    for path, (most, objection) in limits.items():
        if (size := len(attrgetter(path)(message))) > most:
            raise InvalidArgumentError(f"{within}{path}: {size} {objection}")
