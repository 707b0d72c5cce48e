"""A channel to the orchestrator, and errors that say what to change."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flyspec import rpc
from flyspec.addresses import address_problem
from flyspec.client.messages import time_limit
from flyspec.client.requests import shown
from flyspec.credentials import Credentials
from flyspec.errors import (
    ConfigError,
    DeadlineExceededError,
    FlyspecError,
    UnavailableError,
    UnimplementedError,
)
from flyspec.spelling import respell

# gRPC's details if the port or host does not exist.
_NOT_REACHED = ("failed to connect", "errors resolving", "resolution failed")
# Its details if the peer speaks something else, mostly HTTP/1.
_NOT_GRPC = ("Expected SETTINGS frame", "http1.x server", "missing selected ALPN")
# Details of a blocking call whose deadline passes while its server ends it.
_REMOVED = "Stream removed"
# Details if the server closes the connection at once. (With TLS 1.3, the client considers the
# handshake done before the server checks its certificate.)
_HUNG_UP = ("Socket closed", "reset by peer", "Broken pipe")


class Connection:
    """An address and how to talk to it; errors name the address."""

    _kind: ClassVar[str]
    """Name of the port and of its service."""
    _default_port: ClassVar[int]
    hint = "give another address"
    """Advice in errors where there is no server; a command names its flag."""

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        """Without `credentials`, those in the environment (`FLYSPEC_API_KEY`) are used.

        Raises `ConfigError`.
        """
        self._check(address, credentials)
        self.address = address
        self._credentials = credentials or Credentials.from_environment()
        try:
            self._security = self._credentials.security(address)
            self._metadata = self._credentials.metadata()
        except ConfigError as error:
            raise ConfigError(self._called(str(error))) from None

    def _check(self, address: Any, credentials: Any) -> None:
        if not isinstance(address, str) or not address:
            raise ConfigError(f"address: must be HOST:PORT, got {shown(address)}")
        if problem := address_problem(address, self._kind, self._default_port):
            raise ConfigError(f"address {address}: {problem}")
        if not isinstance(credentials, Credentials | None):  # may be a key: not shown
            raise ConfigError(
                f"credentials: must be Credentials or None, got a {type(credentials).__name__}"
            )

    def _error_of(self, error: grpc.RpcError, timeout_s: float | None = None) -> FlyspecError:
        """Return the server's error, or one for a missing server: gRPC uses the same codes.

        `timeout_s` is the call's time limit, if the caller set one.
        """
        code, details = error.code(), error.details() or ""
        other = f"the {self._kind} port is another (default {self._default_port})"
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            if rpc.was_said(error) and not details.startswith(_REMOVED):
                return DeadlineExceededError(details)
            if timeout_s is not None:
                return DeadlineExceededError(
                    f"the request did not end within {timeout_s:g} s; allow more time or fewer "
                    "tokens"
                )
            return UnavailableError(f"{self.address} did not answer in time")
        if code is grpc.StatusCode.UNIMPLEMENTED and rpc.was_said(error):
            return UnimplementedError(f"{self.address}: {details}; {self.hint}")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return UnimplementedError(
                f"the server at {self.address} does not have the {self._kind} service; {other}"
            )
        if code is not grpc.StatusCode.UNAVAILABLE or rpc.was_said(error):
            return rpc.error_of(error)
        if reason := self._tls_problem(details):
            return UnavailableError(f"no connection to {self.address}: {self._called(reason)}")
        if any(what in details for what in _NOT_GRPC):
            return UnavailableError(
                f"the server at {self.address} does not speak gRPC; if this is the HTTP port, "
                f"{other}"
            )
        if any(what in details for what in _NOT_REACHED):
            return UnavailableError(
                f"no server at {self.address}; start one with `flyspec serve`, wait until it says "
                f"that it is ready, or {self.hint}"
            )
        return UnavailableError(f"lost the server at {self.address}: {details}")

    def _called(self, message: str) -> str:
        """A message on the credentials, with the names under which they were given."""
        return respell(message, self._credentials.names)

    def _tls_problem(self, details: str) -> str:
        """Explain a mismatch of TLS settings; empty if there is none."""
        credentials = self._credentials
        if "WRONG_VERSION_NUMBER" in details:
            return "the server does not use TLS; omit --ssl-ca-certs"
        if "Hostname Verification Check failed" in details:
            name = credentials.ssl_target_name or self.address.rpartition(":")[0]
            return (
                f"the server's certificate is not for {name}; use one of its names as address or "
                "--ssl-target-name"
            )
        if "CERTIFICATE_VERIFY_FAILED" in details:
            why = details.rpartition("CERTIFICATE_VERIFY_FAILED: ")[2].removesuffix(": OK")
            return f"the server's certificate is not trusted: {why}; see --ssl-ca-certs"
        if "failed to connect" not in details or not any(what in details for what in _HUNG_UP):
            return ""
        if self._security is None:
            return "the server closed the connection; if it uses TLS, give --ssl-ca-certs"
        if not credentials.ssl_certfile:
            return (
                "the server closed the connection; if it requires a client certificate, give "
                "--ssl-certfile and --ssl-keyfile"
            )
        return (
            "the server closed the connection; the certificate in --ssl-certfile may be expired or "
            "from a CA that it does not trust"
        )


class AsyncConnection(Connection):
    """A connection for coroutines. Each event loop that uses it has a channel of its own."""

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        super().__init__(address, credentials)
        self._links: WeakKeyDictionary[asyncio.AbstractEventLoop, rpc.Link] = WeakKeyDictionary()

    @property
    def _channel(self) -> grpc.aio.Channel:
        loop = asyncio.get_running_loop()
        link = self._links.get(loop)
        if link is None:
            link = self._links[loop] = rpc.Link(self.address, self._security)
        return link.channel

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel running calls of this event loop and close its connection."""
        link = self._links.pop(asyncio.get_running_loop(), None)
        if link is not None:
            await link.close()

    async def check_health(self, service: str = "", timeout_s: float = 5.0) -> str:
        """Return the `grpc.health.v1` status, such as SERVING, of a service or of the server."""
        request = health_pb2.HealthCheckRequest(service=service)
        stub = health_pb2_grpc.HealthStub(self._channel)
        return health_of(await self._call(stub.Check, request, timeout_s))

    async def _call(self, method: Any, request: Any, timeout_s: float) -> Any:
        """Call a unary method. Raises `FlyspecError`."""
        limit_s = time_limit(timeout_s)
        try:
            return await method(request, timeout=limit_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._error_of(error) from None


def health_of(response: health_pb2.HealthCheckResponse) -> str:
    """Return a server's status, such as SERVING."""
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
    return name
