"""The id of a request: in every log line and span of it, and on its way from service to service."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

from flyspec.metadata import REQUEST_ID_KEY, is_request_id

_current: ContextVar[str] = ContextVar("request_id", default="")


def new_request_id() -> str:
    """An id that no other request has."""
    return secrets.token_hex(8)


def request_id() -> str:
    """The id of the request that this task works for; empty if there is none."""
    return _current.get()


def set_request_id(value: str) -> None:
    """From here on this task, and those that it starts, work for that request."""
    _current.set(value)


def request_id_of(metadata: Iterable[Any] | None) -> str:
    """The id that a call's metadata has; empty if it has none, or one of other than 1 to 128 of
    the characters of an id: it goes into logs as it is."""
    for key, value in metadata or ():
        if key == REQUEST_ID_KEY and isinstance(value, str) and is_request_id(value):
            return value
    return ""
