"""Authenticates and authorises calls to the orchestrator by API key."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Any

from flyspec import rpc
from flyspec.errors import PermissionDeniedError, UnauthenticatedError
from flyspec.metadata import AUTHORIZATION_KEY
from flyspec.security import ApiKey, ApiKeys, Scope
from flyspec.security.keys import MAX_KEY_CHARACTERS

log = logging.getLogger(__name__)

_BEARER = "bearer "
_REFLECTION = "/grpc.reflection."
_caller: ContextVar[ApiKey | None] = ContextVar("caller", default=None)


def key_of_call() -> ApiKey | None:
    """Return the API key of the call running in this task; None if keys are not required."""
    return _caller.get()


class KeyCheck:
    """Checks that a call carries an API key with `scope`; reflection accepts any scope."""

    def __init__(self, keys: ApiKeys, scope: Scope) -> None:
        self._keys, self._scope = keys, scope

    def __call__(self, method: str, context: Any) -> None:
        """Record the caller's key. Raises `UnauthenticatedError`, `PermissionDeniedError`."""
        metadata = context.invocation_metadata() or ()
        sent = (value for name, value in metadata if name == AUTHORIZATION_KEY)
        self.admit(next(sent, None), "metadata", method.startswith(_REFLECTION))

    def admit(self, authorization: object, kind: str, any_scope: bool = False) -> None:
        """Record the owner of the key in an `authorization` header or metadata (the `kind`).

        Raises `UnauthenticatedError`, `PermissionDeniedError`.
        """
        owner = self._keys.find(_key_in(authorization, kind))
        if owner is None:
            raise UnauthenticatedError("invalid API key; ask the operator for one")
        if owner.expired:
            raise UnauthenticatedError(f"the API key of {owner.name} has expired; get a new one")
        if self._scope not in owner.scopes and not any_scope:
            raise PermissionDeniedError(
                f"the API key of {owner.name} has scope {', '.join(sorted(owner.scopes))}; "
                f"this port requires {self._scope}"
            )
        _caller.set(owner)


def _key_in(authorization: object, kind: str) -> str:
    """Return the API key sent with a call. Raises `UnauthenticatedError`."""
    if not isinstance(authorization, str):
        raise UnauthenticatedError(
            f"no API key; send {kind} {AUTHORIZATION_KEY}: Bearer KEY (--api-key, FLYSPEC_API_KEY)"
        )
    if (
        authorization[: len(_BEARER)].lower() == _BEARER
        and len(authorization) <= MAX_KEY_CHARACTERS
    ):
        return authorization[len(_BEARER) :].strip()
    raise UnauthenticatedError(
        f"{kind} {AUTHORIZATION_KEY} must be `Bearer` followed by an API key"
    )


def audit(method: str, context: Any) -> None:
    """Log the caller and method of every call to the admin port; rejects nothing."""
    owner = _caller.get()
    names = rpc.names_of(context)
    who = f"key {owner.name}" if owner else f"certificate {names[0]}" if names else "anonymous"
    level = logging.DEBUG if method.rpartition("/")[2].startswith(("Get", "List")) else logging.INFO
    log.log(level, "%s by %s from %s", method.lstrip("/"), who, context.peer())
