"""Metadata of gRPC calls: the keys that flyspec reads, and what may stand under them."""

from __future__ import annotations

import re

CLIENT_ID_KEY = "flyspec-client-id"
"""A client's name for itself, by which limits go if there are no API keys: nothing proves it."""
AUTHORIZATION_KEY = "authorization"
"""`Bearer KEY`, an API key."""
REQUEST_ID_KEY = "x-request-id"
"""The request's id, from clients and between services."""
TRACEPARENT_KEY = "traceparent"
"""The client's span that waits for the request (W3C Trace Context)."""

# What can stand in a log line, a header and a query as it is.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def is_request_id(value: str) -> bool:
    """Whether it is 1 to 128 letters, digits and `._:@/+=-`."""
    return _REQUEST_ID.fullmatch(value) is not None


def is_traceparent(value: str) -> bool:
    """Whether it has the form of one: version, trace id, span id, flags, in lower-case hex."""
    return _TRACEPARENT.fullmatch(value) is not None
