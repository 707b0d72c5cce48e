"""A channel to the orchestrator, and errors that say what to change."""

from __future__ import annotations

from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flyspec import rpc
from flyspec.credentials import Credentials
from flyspec.errors import DeadlineExceededError, FlyspecError, UnavailableError

# What gRPC says when there is no such port or no such host.
_NOT_REACHED = ("failed to connect", "errors resolving", "resolution failed")
# What it says when there is one, which ends the connection before anything was said. Of TLS 1.3 the
# client believes that it is through when the server looks at its certificate.
_HUNG_UP = ("Socket closed", "reset by peer", "Broken pipe")


class Connection:
    """A channel to one address, opened on first use; errors name the address."""

    flag = "--address"

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        """In the clear and without a key if there are no `credentials`. Raises `ConfigError`."""
        self.address = address
        self._credentials = credentials or Credentials()
        self._link = rpc.Link(address, self._credentials.security(address))
        self._metadata = self._credentials.metadata()

    @property
    def _channel(self) -> grpc.aio.Channel:
        return self._link.channel

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what is running and close the connection."""
        await self._link.close()

    async def check_health(self, service: str = "", timeout_s: float = 5.0) -> str:
        """The `grpc.health.v1` status of a service, of the whole server by default: SERVING, ..."""
        stub = health_pb2_grpc.HealthStub(self._channel)
        request = health_pb2.HealthCheckRequest(service=service)
        response = await self._call(stub.Check, request, timeout_s)
        name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
        return name

    async def _call(self, method: Any, request: Any, timeout_s: float) -> Any:
        """The response of a unary method. Raises `FlyspecError`."""
        try:
            return await method(request, timeout=timeout_s, metadata=self._metadata)
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
        if reason := self._tls_problem(details):
            return UnavailableError(f"no connection to {self.address}: {reason}")
        if any(what in details for what in _NOT_REACHED):
            return UnavailableError(
                f"no server at {self.address}; start one with `flyspec serve` or pass {self.flag}"
            )
        return UnavailableError(f"lost the server at {self.address}: {details}")

    def _tls_problem(self, details: str) -> str:
        """Why server and client have no common way to speak; empty if it is not that."""
        credentials = self._credentials
        if "WRONG_VERSION_NUMBER" in details:
            return "the server does not speak TLS there; leave --ssl-ca-certs out"
        if "Hostname Verification Check failed" in details:
            name = credentials.ssl_target_name or self.address.rpartition(":")[0]
            return (
                f"the server's certificate is not for {name}; use a name that is in it, as address "
                "or as --ssl-target-name"
            )
        if "CERTIFICATE_VERIFY_FAILED" in details:
            why = details.rpartition("CERTIFICATE_VERIFY_FAILED: ")[2].removesuffix(": OK")
            return f"the server's certificate is not to be trusted: {why}; see --ssl-ca-certs"
        if "failed to connect" not in details or not any(what in details for what in _HUNG_UP):
            return ""
        if not self._link.secure:
            return "the server hangs up; if it speaks TLS, give --ssl-ca-certs"
        if not credentials.ssl_certfile:
            return (
                "the server hangs up; if it wants a client's certificate, give --ssl-certfile and "
                "--ssl-keyfile"
            )
        return (
            "the server hangs up; it may not accept the certificate in --ssl-certfile: of another "
            "authority, or expired"
        )
