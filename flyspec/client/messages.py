"""Requests as sent: message, metadata, time limit."""

from __future__ import annotations

from typing import Any

from flyspec import wire
from flyspec.client.misfits import UNSENDABLE, misfit
from flyspec.client.requests import is_number, shown
from flyspec.errors import InvalidArgumentError
from flyspec.metadata import REQUEST_ID_KEY, TRACEPARENT_KEY, is_request_id, is_traceparent
from flyspec.values.requests import GenerateOptions, GenerationRequest, ScoreRequest

LONGEST_TIMEOUT_S = 1e9
"""gRPC ends a call with a far longer time limit at once."""


def message_of(request: GenerationRequest | ScoreRequest) -> Any:
    """Return a request's message. Raises `InvalidArgumentError` that names the wrong value."""
    try:
        return wire.encode(request)
    except UNSENDABLE as error:
        reason = misfit(request) or f"the request cannot be sent: {error}"
        raise InvalidArgumentError(reason) from None


def metadata_of(options: GenerateOptions) -> tuple[tuple[str, str], ...]:
    """Return the request's metadata. Raises `InvalidArgumentError`."""
    found = []
    if given := options.request_id:
        if not (isinstance(given, str) and is_request_id(given)):
            raise InvalidArgumentError(
                f"request_id must be 1 to 128 letters, digits and ._:@/+=-, got {shown(given)}"
            )
        found.append((REQUEST_ID_KEY, given))
    if given := options.traceparent:
        if not (isinstance(given, str) and is_traceparent(given)):
            raise InvalidArgumentError(
                "traceparent must be VERSION-TRACE-SPAN-FLAGS with 2, 32, 16 and 2 digits in "
                f"lower-case hex (W3C Trace Context), got {shown(given)}"
            )
        found.append((TRACEPARENT_KEY, given))
    return tuple(found)


def time_limit(timeout_s: float | None) -> float | None:
    """Return a call's time limit in seconds as gRPC takes it. Raises `InvalidArgumentError`."""
    if timeout_s is None:
        return None
    if not (is_number(timeout_s) and timeout_s > 0):
        raise InvalidArgumentError(
            f"timeout_s must be more than 0 seconds, or None, got {shown(timeout_s)}"
        )
    return float(min(timeout_s, LONGEST_TIMEOUT_S))
