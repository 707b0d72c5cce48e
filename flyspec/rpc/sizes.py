"""Limits on message sizes, list lengths and calls per connection."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from flyspec.errors import InvalidArgumentError

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
    """Return the maximum request size for sequences of up to `max_length` tokens.

    Parsing some megabytes of small submessages takes a second and blocks the event loop.
    """
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
