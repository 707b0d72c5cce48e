"""Answers calls that reached the wrong port: which port this is, and where the service is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from flyspec.config import ADMIN_PORT, DRAFT_PORT, GENERATION_PORT, VERIFY_PORT
from flyspec.errors import UnimplementedError
from flyspec.v1 import admin_pb2, draft_pb2, generation_pb2, verify_pb2

_PLACES = {
    generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]: (
        "the generation port of an orchestrator", "--port", GENERATION_PORT
    ),
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"]: (
        "the admin port of an orchestrator", "--admin-port", ADMIN_PORT
    ),
    draft_pb2.DESCRIPTOR.services_by_name["DraftService"]: (
        "the port of a draft service", "--port", DRAFT_PORT
    ),
    verify_pb2.DESCRIPTOR.services_by_name["VerifyService"]: (
        "the port of a verify service", "--port", VERIFY_PORT
    ),
}  # fmt: skip
"""Place of each service: the port's name, its flag and its usual number."""
_METHODS = {
    f"/{service.full_name}/{method.name}": service
    for service in _PLACES
    for method in service.methods
}


class Elsewhere(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Ends calls of services that this port does not have with UNIMPLEMENTED.

    `names` are the services that it has; `neighbours` the ports of this process's others, by full
    name. Only methods that exist somewhere: metrics have a series per method.
    """

    def __init__(self, names: Sequence[str], neighbours: Mapping[str, int]) -> None:
        self._names, self._neighbours = names, neighbours

    def service(self, handler_call_details: Any) -> Any:
        """Return the handler of a call (gRPC's interface); None for an unknown method."""
        if handler_call_details.method not in _METHODS:
            return None
        wanted = _METHODS[handler_call_details.method]

        async def refuse(requests: Any, context: Any) -> None:
            raise UnimplementedError(self.text(wanted))

        return grpc.stream_stream_rpc_method_handler(refuse)

    def text(self, wanted: Any) -> str:
        """Say which port this is and where the wanted service is."""
        known = (at[0] for service, at in _PLACES.items() if service.full_name in self._names)
        here = next(known, "another port")
        place, flag, usual = _PLACES[wanted]
        if port := self._neighbours.get(wanted.full_name):
            return f"this is {here}; {wanted.name} is at its {flag}, {port} here"
        return f"this is {here}; {wanted.name} is at {place} ({flag}, usually {usual})"
