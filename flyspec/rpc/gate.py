"""Who may call: a look at every call before anything of its request is read."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

from flyspec.errors import FlyspecError, PermissionDeniedError
from flyspec.interceptors import Interceptor, wrap
from flyspec.rpc.statuses import abort
from flyspec.security import PortSecurity

log = logging.getLogger(__name__)

LOGGED_A_SECOND = 10
HEALTH = "/grpc.health.v1.Health/"

Check = Callable[[str, Any], None]
"""Looks at a call's method and context, and raises `FlyspecError` if it may not be."""


class Gate(Interceptor):
    """Ends calls that a check refuses with its status. Health is open: probes come with nothing.

    Goes before `MalformedRequests`, so that nothing is parsed for who may not call.
    """

    def __init__(self, checks: Collection[Check]) -> None:
        self._checks = list(checks)
        self._second, self._logged = 0, 0

    def around_method(self, found: Any, details: Any) -> Any:
        """The call's handler behind the checks."""
        method = details.method
        if not self._checks or method.startswith(HEALTH):
            return found
        return wrap(found, lambda context: self._behind(method, context))

    @asynccontextmanager
    async def _behind(self, method: str, context: Any) -> AsyncIterator[None]:
        """A call that begins only if every check lets it."""
        try:
            for check in self._checks:
                check(method, context)
        except FlyspecError as error:
            if self._is_to_be_logged():
                log.info("%s from %s refused: %s", method.lstrip("/"), context.peer(), error)
            await abort(context, method, error)
        yield

    def _is_to_be_logged(self) -> bool:
        """Whether a refusal that comes now is: who is refused must not fill the disk."""
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._logged = second, 0
        self._logged += 1
        return self._logged <= LOGGED_A_SECOND


class CertificateNames:
    """A check that a client's certificate has one of these names, as subject or alternative."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)

    def __call__(self, method: str, context: Any) -> None:
        """Raise `PermissionDeniedError` for others."""
        found = names_of(context)
        if self._names.isdisjoint(found):
            raise PermissionDeniedError(
                f"the client's certificate is of {', '.join(found) or 'nobody'}, which may not "
                "call here"
            )


def checks_of(security: PortSecurity) -> list[Check]:
    """What a port with that security checks of every call."""
    return [CertificateNames(security.names)] if security.names else []


def names_of(context: Any) -> list[str]:
    """The names in the certificate that a call's client showed; none without one."""
    found = context.auth_context()
    names = [
        name.decode(errors="replace")
        for key in ("x509_subject_alternative_name", "x509_common_name")
        for name in found.get(key, ())
    ]
    return list(dict.fromkeys(names))
