"""The operator's port, synchronously: what load tests look at, and the swap of drafters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import grpc

from flyspec.errors import FlyspecError
from flyspec.v1 import admin_pb2, admin_pb2_grpc
from loadtest.connection import Endpoint
from loadtest.users.grpc import error_of


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What is open behind the orchestrator. `processes` are the services' instances by address."""

    active: int
    waiting: int
    target_sessions: int
    draft_sessions: int
    slots: int
    refused_total: int
    processes: dict[str, str]

    @property
    def left(self) -> dict[str, int]:
        """What must be gone when nobody asks."""
        return {
            "generations": self.active,
            "waiting": self.waiting,
            "target sessions": self.target_sessions,
            "draft sessions": self.draft_sessions,
        }


class Admin:
    """Calls of `AdminService`; each raises `FlyspecError`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._channel = endpoint.connect()
        self._metadata = endpoint.metadata
        self._stub = admin_pb2_grpc.AdminServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def status(self) -> Occupancy:
        """How things stand."""
        answer = self._ask("GetStatus", admin_pb2.GetStatusRequest())
        targets, drafters = list(answer.targets), list(answer.drafters)
        limits = [sum(u.sessions.limit for u in us if u.ready) for us in (targets, drafters)]
        return Occupancy(
            active=answer.active_generations,
            waiting=answer.waiting_generations,
            target_sessions=sum(u.sessions.active for u in targets),
            draft_sessions=sum(u.sessions.active for u in drafters),
            slots=min((limit for limit in limits if limit), default=0),
            refused_total=answer.refused_total,
            processes={u.address: u.process.instance_id for u in targets if u.ready},
        )

    def drafters(self) -> list[admin_pb2.DrafterStatus]:
        """All of them, the active one first."""
        return list(self._ask("ListDrafters", admin_pb2.ListDraftersRequest()).drafters)

    def register(self, name: str, address: str, kind: str = "") -> float:
        """Add a drafter, or an address to one; the time of its proposal on trial, ms."""
        request = admin_pb2.RegisterDrafterRequest(name=name, address=address, kind=kind)
        return float(self._ask("RegisterDrafter", request, 60.0).probe_ns) / 1e6

    def activate(self, name: str, share: float | None = None) -> None:
        """Give a drafter all new generations, or a share of them."""
        self._ask("ActivateDrafter", admin_pb2.ActivateDrafterRequest(name=name, share=share))

    def drain(self, name: str, wait_s: float) -> int:
        """Take its generations from a drafter; how many it still has after that time."""
        request = admin_pb2.DrainDrafterRequest(name=name, wait_ms=round(1e3 * wait_s))
        answer = self._ask("DrainDrafter", request, wait_s + 10.0)
        return int(answer.drafter.stats.active_generations)

    def remove(self, name: str, force: bool = False) -> None:
        """Forget a drafter."""
        self._ask("RemoveDrafter", admin_pb2.RemoveDrafterRequest(name=name, force=force))

    def _ask(self, method: str, request: Any, timeout_s: float = 10.0) -> Any:
        try:
            return getattr(self._stub, method)(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            found = error_of(error)
            raise FlyspecError(f"{method}: {found}") from None
