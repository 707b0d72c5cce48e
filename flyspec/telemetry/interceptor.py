"""Server interceptor that sets the request ID of each call, counts calls and logs their errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge

from flyspec.interceptors import Interceptor, wrap
from flyspec.telemetry.logs import errors_returned, fields
from flyspec.telemetry.request_ids import (
    client,
    new_request_id,
    request_id_of,
    set_request_id,
)


class CallMetrics:
    """Metrics of the calls to all servers of a process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.ended = Counter(
            "flyspec_rpc_calls",
            "Ended calls by method and gRPC status; a session is one call.",
            ["method", "code"],
            registry=registry,
        )
        self.open = Gauge(
            "flyspec_rpc_open_calls",
            "Currently open calls by method.",
            ["method"],
            registry=registry,
        )


class Calls(Interceptor):
    """Counts calls, logs errors and sets the request ID of a call's task from its metadata.

    With `make_ids`, a call without an ID gets a new one.
    """

    def __init__(self, metrics: CallMetrics, make_ids: bool) -> None:
        self._metrics, self._make_ids = metrics, make_ids

    def around_method(self, found: Any, details: Any) -> Any:
        identifier = request_id_of(details.invocation_metadata)
        if not identifier and self._make_ids:
            identifier = new_request_id()
        method = details.method.lstrip("/")
        return wrap(found, lambda context: self._counted(method, identifier, context))

    @asynccontextmanager
    async def _counted(self, method: str, identifier: str, context: Any) -> AsyncIterator[None]:
        set_request_id(identifier)
        self._metrics.open.labels(method).inc()
        peer = context.peer()  # a crash of the process once the call is gone
        otherwise = "OK"
        try:
            yield
        except BaseException as error:
            cancelled = isinstance(error, asyncio.CancelledError | GeneratorExit)
            otherwise = "CANCELLED" if cancelled else "UNKNOWN"
            raise
        finally:
            self._metrics.open.labels(method).dec()
            said = _CODES.get(context.code() or 0, "UNKNOWN")
            code = otherwise if said == "OK" else said
            self._metrics.ended.labels(method, code).inc()
            if code not in ("OK", "CANCELLED"):
                why = fields(
                    method=method, code=code, client=client() or peer, reason=context.details()
                )
                errors_returned.info("call ended with an error", extra=why)


# A context has its status as a number, or as an enum member if that was set.
_CODES: dict[Any, str] = {
    **{code: code.name for code in grpc.StatusCode},
    **{code.value[0]: code.name for code in grpc.StatusCode},
}
