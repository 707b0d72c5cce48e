"""Synchronous calls of the admin port: status, and swapping drafters."""

from __future__ import annotations

from typing import Any

import grpc

from flyspec import rpc, wire
from flyspec.client import DrafterStatus, Status
from flyspec.errors import FlyspecError
from flyspec.v1 import admin_pb2, admin_pb2_grpc
from loadtest.connection import Endpoint


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
        self._channel = endpoint.connect()
        self._metadata = endpoint.metadata
        self._stub = admin_pb2_grpc.AdminServiceStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def status(self) -> Status:
        """The state of the orchestrator and of the services behind it."""
        return wire.decode(Status, self._ask("GetStatus", admin_pb2.GetStatusRequest()))

    def drafters(self) -> list[DrafterStatus]:
        """All drafters, the active one first."""
        found = self._ask("ListDrafters", admin_pb2.ListDraftersRequest()).drafters
        return [wire.decode(DrafterStatus, drafter) for drafter in found]

    def register(self, name: str, address: str, kind: str = "") -> float:
        """Add a drafter, or a replica of one; the time of its test proposal in ms."""
        request = admin_pb2.RegisterDrafterRequest(name=name, address=address, kind=kind)
        return float(self._ask("RegisterDrafter", request, 60.0).probe_ns) / 1e6

    def activate(self, name: str, share: float | None = None) -> None:
        """Give a drafter all new generations, or a share of them."""
        self._ask("ActivateDrafter", admin_pb2.ActivateDrafterRequest(name=name, share=share))

    def drain(self, name: str, wait_s: float) -> int:
        """Move a drafter's generations to others; how many it still has after that time."""
        request = admin_pb2.DrainDrafterRequest(name=name, wait_ms=round(1e3 * wait_s))
        answer = self._ask("DrainDrafter", request, wait_s + 10.0)
        return int(answer.drafter.stats.active_generations)

    def remove(self, name: str, force: bool = False) -> None:
        self._ask("RemoveDrafter", admin_pb2.RemoveDrafterRequest(name=name, force=force))

    def _ask(self, method: str, request: Any, timeout_s: float = 10.0) -> Any:
        try:
            return getattr(self._stub, method)(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise FlyspecError(f"{method}: {rpc.error_of(error)}") from None
