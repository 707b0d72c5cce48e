"""A gRPC server with limits, error statuses, health checks, reflection and draining."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from flyspec.config import ADMIN_PORT, DRAFT_PORT, GENERATION_PORT, VERIFY_PORT
from flyspec.errors import ConfigError, UnimplementedError
from flyspec.rpc.channel import KEEPALIVE
from flyspec.rpc.gate import Check, Gate
from flyspec.rpc.malformed import MalformedRequests
from flyspec.rpc.sizes import MAX_MESSAGE_BYTES, MAX_STREAMS
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


MAX_PENDING_CALLS = 1_000_000
SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Otherwise two servers could share a port, each getting some of the connections.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    *KEEPALIVE,  # detects vanished clients, to free their sessions
    # Connections that stay silent or do not speak TLS; gRPC's default is two minutes.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Calls that a busy event loop has not taken up yet. gRPC cancels them at random beyond 1,000,
    # without a message; ours are refused by admission, with the time to retry after.
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
]
CONNECTION_AGE_MS = 3_600_000
"""Maximum age of a TLS connection; then new calls need a new handshake, with a valid certificate.

Running calls finish on the old connection.
"""


class GrpcServer:
    """One listening port with health checks and reflection; not ready until `set_ready`.

    `services` pairs each generated `add_*Servicer_to_server` with a servicer; `names` are the
    services' full names. `max_streams` limits concurrent calls per connection. Plaintext without
    `credentials`. All calls pass `interceptors`; then `checks` may refuse them before a request is
    read.
    """

    def __init__(
        self,
        host: str,
        port: int,
        services: list[tuple[Callable[[Any, grpc.aio.Server], None], Any]],
        names: list[str],
        max_streams: int = MAX_STREAMS,
        max_request_bytes: int = MAX_MESSAGE_BYTES,
        credentials: grpc.ServerCredentials | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        checks: Sequence[Check] = (),
    ) -> None:
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._names = names
        self._port = port
        self._credentials = credentials
        age = [("grpc.max_connection_age_ms", CONNECTION_AGE_MS)] if credentials else []
        self._server = grpc.aio.server(
            interceptors=[*interceptors, Gate(checks), MalformedRequests()],
            options=[
                *SERVER_OPTIONS,
                *age,
                ("grpc.max_receive_message_length", max_request_bytes),
                ("grpc.max_concurrent_streams", max_streams),
            ],
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        for add, servicer in services:
            add(servicer, self._server)
        reflection.enable_server_reflection(
            [*names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server
        )
        self.neighbours: dict[str, int] = {}
        """Ports of this process's other services by full name, to tell calls that want them."""
        self._server.add_generic_rpc_handlers((Elsewhere(names, self.neighbours),))

    async def start(self) -> int:
        """Listen, not ready yet. Return the bound port."""
        try:
            if self._credentials is None:
                port = self._server.add_insecure_port(self._address)
            else:
                port = self._server.add_secure_port(self._address, self._credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {self._address}: the port is in use or not allowed; "
                "stop the other process or choose another port (0 picks a free one)"
            ) from error
        await self.set_ready(False)
        await self._server.start()
        self._port = int(port)
        return self._port

    @property
    def port(self) -> int:
        return self._port

    async def set_ready(self, ready: bool) -> None:
        status = health_pb2.HealthCheckResponse.ServingStatus
        state = status.SERVING if ready else status.NOT_SERVING
        for name in ["", *self._names]:
            await self._health.set(name, state)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let running ones finish for `grace_s` seconds, then cancel them."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
