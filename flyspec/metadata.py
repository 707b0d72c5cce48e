"""Metadata keys of gRPC calls and headers of HTTP, and the format of their values."""

from __future__ import annotations

import re

CLIENT_ID_KEY = "flyspec-client-id"
"""The client's self-chosen name for per-client limits when there are no API keys; unverified."""
AUTHORIZATION_KEY = "authorization"
"""`Bearer KEY`, an API key."""
REQUEST_ID_KEY = "x-request-id"
"""The request ID, from clients and between services."""
RULE_KEY = "x-flyspec-rule"
"""The acceptance rules of a reply over HTTP, in the order of its phases."""
TRACEPARENT_KEY = "traceparent"
"""The caller's span (W3C Trace Context)."""

# Safe to use verbatim in a log line, a header and a query.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def is_request_id(value: str) -> bool:
    """True if it is 1 to 128 letters, digits and `._:@/+=-`."""
    return _REQUEST_ID.fullmatch(value) is not None


def is_traceparent(value: str) -> bool:
    """True if it has the form version-trace_id-span_id-flags, in lower-case hex."""
    return _TRACEPARENT.fullmatch(value) is not None
