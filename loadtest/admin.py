"""Synchronous calls of the admin port: status, and swapping drafters."""

from __future__ import annotations

from typing import Any

import grpc

from flyspec import rpc, wire
from flyspec.client import DrafterStatus, Status
from flyspec.errors import FlyspecError
from flyspec.v1 import admin_pb2, admin_pb2_grpc
from loadtest.options import Endpoint


def left_open(status: Status) -> dict[str, int]:
    """Return what must be 0 without requests: sessions of both services, generations."""
    return {
        "verify sessions": sum(u.sessions.active for u in status.targets),
        "draft sessions": sum(u.sessions.active for u in status.drafters),
        "generations": status.active_generations,
        "waiting": status.waiting_generations,
    }


def slots(status: Status) -> int | None:
    """Return how many generations the services can hold at once; None if unknown."""
    limits = [
        sum(u.sessions.limit for u in of if u.ready) for of in (status.targets, status.drafters)
    ]
    return min((limit for limit in limits if limit), default=None)


class Admin:
    """Calls of `AdminService`; each raises `FlyspecError`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._channel, self._credentials = endpoint.connect(), endpoint.credentials
        self._stub = admin_pb2_grpc.AdminServiceStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def status(self) -> Status:
        """Return the state of the orchestrator and of the services behind it."""
        return wire.decode(Status, self.ask("GetStatus"))

    def drafters(self) -> list[DrafterStatus]:
        """Return all drafters, the active one first."""
        found = self.ask("ListDrafters").drafters
        return [wire.decode(DrafterStatus, drafter) for drafter in found]

    def drain(self, name: str, wait_s: float) -> int:
        """Move a drafter's generations to others; return how many it still has after that time."""
        answer = self.ask("DrainDrafter", wait_s + 10.0, name=name, wait_ms=round(1e3 * wait_s))
        return int(answer.drafter.stats.active_generations)

    def ask(self, method: str, timeout_s: float = 60.0, **fields: Any) -> Any:
        """Call a method with these fields of its request; return its response."""
        request = getattr(admin_pb2, f"{method}Request")(**fields)
        metadata = self._credentials.metadata()
        try:
            return getattr(self._stub, method)(request, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            raise FlyspecError(f"{method}: {rpc.error_of(error)}") from None
