"""Who may administer over HTTP: only with an API key, and no more widely than by the admin port."""

from __future__ import annotations

import logging
from typing import Any

from flyspec.config import OrchestratorSettings
from flyspec.errors import PermissionDeniedError
from flyspec.rpc import CertificateNames
from flyspec.security import Scope, is_loopback
from orchestrator.front.access import key_of_call

log = logging.getLogger(__name__)


class Operators:
    """Decides who is an operator.

    A key of scope `admin` is required even where the admin port requires none: a proxy or tunnel
    may make strangers of an HTTP port on loopback, and browsers carry requests of any page to it.
    Besides, an operator must meet what the admin port requires otherwise: come from this machine,
    if it listens on loopback, and have a certificate that it would accept.
    """

    def __init__(self, settings: OrchestratorSettings) -> None:
        admin, mine = settings.admin_security, settings.port_security
        self._keys = mine.keys
        self._local = is_loopback(admin.host)
        self._certificates = admin.wants_certificates
        self._names = CertificateNames(admin.names) if admin.names else None
        self._is_closed = is_loopback(mine.host) and self._local and not self._certificates

    def admit(self, scope: Any) -> str:
        """Return the name of the key of a request by an operator.

        Raises `PermissionDeniedError`.
        """
        owner = key_of_call()
        if not self._keys or owner is None:
            raise PermissionDeniedError(
                "over HTTP, drafters are activated only with an API key of scope admin, and this "
                "server has no keys; use `flyspec drafters activate`, or give --api-keys-file"
            )
        if Scope.ADMIN not in owner.scopes:
            raise PermissionDeniedError(
                f"the API key of {owner.name} has scope {', '.join(sorted(owner.scopes))}; this "
                f"requires {Scope.ADMIN}"
            )
        client = scope["client"]
        if self._local and not (client and is_loopback(client[0])):
            raise PermissionDeniedError(
                "the admin port listens on this machine alone, so drafters are activated over HTTP "
                "only from it; see --admin-host"
            )
        if self._certificates:
            found = scope["state"]["connection"].certificate_names
            if not found:
                raise PermissionDeniedError(
                    "the admin port requires a client certificate, and this connection has none; "
                    "use `flyspec drafters activate`"
                )
            if self._names is not None:
                self._names.admit(found)
        return owner.name

    def is_told_details(self, scope: Any) -> bool:
        """True if a request is told addresses and statistics.

        Without keys everybody is, if nobody but this machine reaches this port and the admin port.
        """
        return self.admits(scope) if self._keys else self._is_closed

    def admits(self, scope: Any) -> bool:
        """True if a request is an operator's."""
        try:
            self.admit(scope)
        except PermissionDeniedError:
            return False
        return True
