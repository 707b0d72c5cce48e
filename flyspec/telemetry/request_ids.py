"""Request IDs, which appear in logs and spans and are passed from service to service; clients."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

from flyspec.metadata import REQUEST_ID_KEY, is_request_id

_current: ContextVar[str] = ContextVar("request_id", default="")
_client: ContextVar[str] = ContextVar("client", default="")


def new_request_id() -> str:
    return secrets.token_hex(8)


def request_id() -> str:
    """Return the ID of the current task's request; empty if none."""
    return _current.get()


def set_request_id(value: str) -> None:
    """Set the request ID of the current task and of tasks it starts from now on."""
    _current.set(value)


def client() -> str:
    """Return the client of the current task's request, as in logs; empty if it is not known."""
    return _client.get()


def set_client(name: str) -> None:
    _client.set(name)


def request_id_of(metadata: Iterable[Any] | None) -> str:
    """Return the ID in a call's metadata; empty if missing or malformed."""
    for key, value in metadata or ():
        if key == REQUEST_ID_KEY and isinstance(value, str) and is_request_id(value):
            return value
    return ""
