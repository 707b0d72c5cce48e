"""The status that the admin port tells, by a synchronous call."""

from __future__ import annotations

import grpc

from flyspec import rpc, wire
from flyspec.client import Status
from flyspec.errors import FlyspecError
from flyspec.v1 import admin_pb2, admin_pb2_grpc
from loadtest.options import Endpoint

TIMEOUT_S = 60.0


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


def status_at(endpoint: Endpoint) -> Status:
    """Return the state of the orchestrator and of the services behind it.

    Raises `FlyspecError`.
    """
    request, metadata = admin_pb2.GetStatusRequest(), endpoint.credentials.metadata()
    with endpoint.connect() as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        try:
            found = stub.GetStatus(request, timeout=TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            raise FlyspecError(f"GetStatus: {rpc.error_of(error)}") from None
    return wire.decode(Status, found)
