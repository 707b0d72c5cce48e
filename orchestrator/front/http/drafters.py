"""`/v1/drafters`: the drafters, and which one new generations use."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import Request
from pydantic import Field

from orchestrator.fleet.drafter import RegisteredDrafter
from orchestrator.fleet.fleet import Fleet
from orchestrator.front.http.bodies import Body
from orchestrator.front.http.operators import Operators
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
