"""`/v1/drafters`: the drafters, which one new generations use, and who may change that."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import Request
from pydantic import Field

from flyspec.config import OrchestratorSettings
from flyspec.errors import PermissionDeniedError
from flyspec.rpc import CertificateNames
from flyspec.security import Scope, is_loopback
from orchestrator.fleet.drafter import RegisteredDrafter
from orchestrator.fleet.fleet import Fleet
from orchestrator.front.access import key_of_call
from orchestrator.front.http.bodies import Body
from orchestrator.front.statuses import drafter_status

log = logging.getLogger(__name__)

TOLD = ("name", "kind", "state", "active", "usable", "share", "translated")
"""Fields for everybody; the rest has addresses and the activity of others."""


class ActivationBody(Body):
    """Which generations a drafter gets."""

    share: float | None = Field(
        None,
        description="Fraction of new generations that name no drafter, for a canary; 0 ends it. "
        "Else all of them, and running ones move to it.",
    )


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


class DrafterEndpoints:
    """Lists drafters for clients and operators, and activates one for operators."""

    def __init__(self, fleet: Fleet, operators: Operators) -> None:
        self._fleet, self._operators = fleet, operators

    async def list_drafters(self, request: Request) -> dict[str, Any]:
        """List the drafters, the active one first; operators get addresses and statistics."""
        operators, scope = self._operators, request.scope
        return {
            "object": "list",
            "administers": operators.admits(scope),
            "data": self.documents(operators.is_told_details(scope)),
        }

    async def activate_drafter(
        self, name: str, request: Request, body: ActivationBody | None = None
    ) -> dict[str, Any]:
        """Give a drafter all new generations that name none, or a share of them."""
        operator = self._operators.admit(request.scope)
        drafter = self._fleet.drafters.activate(name, body.share if body else None)
        where = request.client.host if request.client else "an unknown address"
        log.info("drafter %s activated over HTTP by key %s from %s", name, operator, where)
        return self._document(drafter, True)

    def documents(self, whole: bool) -> list[dict[str, Any]]:
        """Return the drafters; `whole` with addresses and statistics."""
        return [self._document(drafter, whole) for drafter in self._fleet.drafters.all]

    def _document(self, drafter: RegisteredDrafter, whole: bool) -> dict[str, Any]:
        document = drafter_status(drafter, self._fleet.target.info.model).document()
        return document if whole else {name: document[name] for name in TOLD}
