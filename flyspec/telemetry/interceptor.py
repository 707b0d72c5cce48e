"""What every gRPC server does at the beginning and end of a call: its request's id, its count."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge

from flyspec.interceptors import wrap
from flyspec.telemetry.request_ids import new_request_id, request_id_of, set_request_id


class CallMetrics:
    """Calls by method and status, for all servers of a process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.ended = Counter(
            "flyspec_rpc_calls",
            "Calls that ended, by method and gRPC status; a session is one call.",
            ["method", "code"],
            registry=registry,
        )
        self.open = Gauge(
            "flyspec_rpc_open_calls",
            "Calls that are open now, by method.",
            ["method"],
            registry=registry,
        )


class Calls(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Counts calls, and makes the id in a call's metadata that of its task.

    With `make_ids`, a call without one gets a new one: this is where requests come in.
    """

    def __init__(self, metrics: CallMetrics, make_ids: bool) -> None:
        self._metrics, self._make_ids = metrics, make_ids

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """The call's handler, wrapped; None if there is no such method."""
        found = await continuation(handler_call_details)
        if found is None:
            return None
        identifier = request_id_of(handler_call_details.invocation_metadata)
        if not identifier and self._make_ids:
            identifier = new_request_id()
        method = handler_call_details.method.lstrip("/")
        return wrap(found, lambda context: _Counted(self._metrics, method, identifier, context))


class _Counted(AbstractAsyncContextManager[None]):
    """A block that is one call, for the request of that id."""

    __slots__ = ("_context", "_identifier", "_method", "_metrics")

    def __init__(self, metrics: CallMetrics, method: str, identifier: str, context: Any) -> None:
        self._metrics, self._method, self._context = metrics, method, context
        self._identifier = identifier

    async def __aenter__(self) -> None:
        set_request_id(self._identifier)
        self._metrics.open.labels(self._method).inc()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._metrics.open.labels(self._method).dec()
        self._metrics.ended.labels(self._method, self._code(kind)).inc()

    def _code(self, kind: type[BaseException] | None) -> str:
        """The name of the status that the call ends with."""
        said = _CODES.get(self._context.code() or 0, "UNKNOWN")
        if said != "OK" or kind is None:
            return said
        return "CANCELLED" if issubclass(kind, asyncio.CancelledError) else "UNKNOWN"


# A context knows its status as a number, or as a member once it was set by its name.
_CODES: dict[Any, str] = {
    **{code: code.name for code in grpc.StatusCode},
    **{code.value[0]: code.name for code in grpc.StatusCode},
}
