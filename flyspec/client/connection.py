"""A channel to the orchestrator, and errors that say what to change."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flyspec import rpc
from flyspec.errors import DeadlineExceededError, FlyspecError, UnavailableError

# What gRPC says when there is no such port or no such host.
_NOT_REACHED = ("failed to connect", "errors resolving", "resolution failed")

T = TypeVar("T")


class Connection:
    """A channel to one address, opened on first use; errors name the address."""

    flag = "--address"

    def __init__(self, address: str) -> None:
        self.address = address
        self._opened: grpc.aio.Channel | None = None

    @property
    def _channel(self) -> grpc.aio.Channel:
        if self._opened is None:
            self._opened = rpc.connect(self.address)
        return self._opened

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what is running and close the connection."""
        if self._opened is not None:
            await self._opened.close()
            self._opened = None

    async def check_health(self, service: str = "", timeout_s: float = 5.0) -> str:
        """The `grpc.health.v1` status of a service, of the whole server by default: SERVING, ..."""
        stub = health_pb2_grpc.HealthStub(self._channel)
        request = health_pb2.HealthCheckRequest(service=service)
        response: Any = await self._call(stub.Check(request, timeout=timeout_s))
        name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
        return name

    async def _call(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise self._error_of(error) from None

    def _error_of(self, error: grpc.aio.AioRpcError) -> FlyspecError:
        """The server's own error, or that there is none: gRPC uses UNAVAILABLE for both."""
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            if rpc.was_said(error):
                return DeadlineExceededError(error.details() or "")
            return UnavailableError(f"{self.address} did not answer in time")
        if error.code() is not grpc.StatusCode.UNAVAILABLE or rpc.was_said(error):
            return rpc.error_of(error)
        details = error.details() or ""
        if any(what in details for what in _NOT_REACHED):
            return UnavailableError(
                f"no server at {self.address}; start one with `flyspec serve` or pass {self.flag}"
            )
        return UnavailableError(f"lost the server at {self.address}: {details}")
