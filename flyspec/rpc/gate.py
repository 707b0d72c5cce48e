"""Access checks of calls, before their requests are read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

from flyspec.errors import FlyspecError, PermissionDeniedError
from flyspec.interceptors import Interceptor, wrap
from flyspec.rpc.statuses import abort
from flyspec.security import PortSecurity

HEALTH = "/grpc.health.v1.Health/"

Check = Callable[[str, Any], None]
"""Checks a call's method and context; raises `FlyspecError` to refuse it."""


class Gate(Interceptor):
    """Ends refused calls with the check's status. Health checks are open, as probes send no keys.

    Runs before `MalformedRequests`, so that nothing is parsed for refused clients.
    """

    def __init__(self, checks: Collection[Check]) -> None:
        self._checks = list(checks)

    def around_method(self, found: Any, details: Any) -> Any:
        method = details.method
        if not self._checks or method.startswith(HEALTH):
            return found
        return wrap(found, lambda context: self._checked(method, context))

    @asynccontextmanager
    async def _checked(self, method: str, context: Any) -> AsyncIterator[None]:
        try:
            for check in self._checks:
                check(method, context)
        except FlyspecError as error:
            await abort(context, method, error)
        yield


class CertificateNames:
    """Checks that a client certificate has one of these common or alternative names."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)

    def __call__(self, method: str, context: Any) -> None:
        self.admit(names_of(context))

    def admit(self, found: Collection[str]) -> None:
        """Raise `PermissionDeniedError` unless one of a certificate's names is allowed."""
        if self._names.isdisjoint(found):
            raise PermissionDeniedError(
                f"the client certificate's name ({', '.join(found) or 'none'}) is not allowed here"
            )


def checks_of(security: PortSecurity) -> list[Check]:
    """Return the checks of calls to a port with that security."""
    return [CertificateNames(security.names)] if security.names else []


def names_of(context: Any) -> list[str]:
    """Return the names in the client's certificate; empty without one."""
    found = context.auth_context()
    names = [
        name.decode(errors="replace")
        for key in ("x509_subject_alternative_name", "x509_common_name")
        for name in found.get(key, ())
    ]
    return list(dict.fromkeys(names))
