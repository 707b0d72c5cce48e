"""Gate of every HTTP request: its id, access, limits, metrics, and who has left.

Plain ASGI around the application, so that nothing is parsed for refused clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from flyspec.config import OrchestratorSettings
from flyspec.errors import (
    DeadlineExceededError,
    FlyspecError,
    IdleTimeoutError,
    PermissionDeniedError,
    UnavailableError,
)
from flyspec.metadata import (
    AUTHORIZATION_KEY,
    CLIENT_ID_KEY,
    REQUEST_ID_KEY,
    TRACEPARENT_KEY,
    is_request_id,
)
from flyspec.rpc import CertificateNames
from flyspec.rpc.malformed import REQUEST_TIMEOUT_S
from flyspec.security import PortSecurity
from flyspec.security.hosts import ALL, is_served
from flyspec.telemetry import fields, new_request_id
from flyspec.telemetry.logs import errors_returned
from flyspec.telemetry.request_ids import set_request_id
from orchestrator.admission.admission import Visit
from orchestrator.admission.clients import Caller, network_of
from orchestrator.front.access import KeyCheck, key_of_call
from orchestrator.front.http.errors import TooLargeError, UnsupportedEncodingError, response_of
from orchestrator.front.http.event_stream import STOPPED

log = logging.getLogger(__name__)

OPEN = ("/", "/health", "/version")
"""Paths without access checks: probes send no keys, nor do browsers for a page's files."""
OPEN_BELOW = "/page/"
ANY_SCOPE = "/v1/drafters"
"""Paths from here on accept keys of any scope, and decide themselves what each may do."""
DISCARD_S, DISCARD_BYTES = 5.0, 64 << 20
"""Maximum of a refused body that is still read; beyond it the connection breaks."""
COUNTED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Paths whose requests admission counts, from before their bodies are read."""
OTHER = "other"
LEFT = 499
"""Code in metrics for clients that left, as nginx counts them."""


class HttpMetrics:
    """Counts of HTTP requests; `paths` are those served, all others are one."""

    def __init__(self, registry: CollectorRegistry, paths: Collection[str]) -> None:
        self._paths = frozenset(paths)
        self.ended = Counter(
            "flyspec_http_requests",
            "Ended HTTP requests by path and status code; 499: the client left.",
            ["path", "code"],
            registry=registry,
        )
        self.open = Gauge(
            "flyspec_http_open_requests",
            "HTTP requests being answered, by path.",
            ["path"],
            registry=registry,
        )

    def label(self, path: str) -> str:
        """Return the served path that this one is, with its parameters' names."""
        if path in self._paths:
            return path
        return next(
            (p for p in self._paths if "{" in p and path.startswith(p.split("{")[0])), OTHER
        )


@dataclass(frozen=True)
class Limits:
    """Maximum bytes of a body, and seconds that a client may leave a response unread."""

    max_body_bytes: int
    write_timeout_s: float


class Origins:
    """Refuses requests by foreign names, and those of other origins' pages.

    A name needs no check where a client must have a key or certificate: a page of another name has
    neither.
    """

    def __init__(self, settings: OrchestratorSettings) -> None:
        security = settings.port_security
        guarded = security.keys or security.wants_certificates
        self._hosts = (ALL,) if guarded else (settings.host, *settings.hosts)
        self._origins = settings.origins

    def admit(self, headers: Mapping[bytes, bytes]) -> None:
        """Raises `PermissionDeniedError`. Requests that no browser sends may lack both headers."""
        host = headers.get(b"host", b"").decode("latin-1")
        if host and not is_served(host, self._hosts):
            raise PermissionDeniedError(
                f"this server is not called by the name {host!r:.200}; use its IP address, or add "
                "the name to --allowed-hosts"
            )
        origin = headers.get(b"origin", b"").decode("latin-1")
        own = origin.partition("://")[2].lower() == host.lower()
        if origin and not own and not {origin, ALL} & {*self._origins}:
            raise PermissionDeniedError(
                f"pages of {origin!r:.200} may not call this server; add the origin to "
                "--http-allowed-origins, or have the proxy in front of this server keep the Host"
            )


class HttpGate:
    """Wraps an ASGI application.

    `keys` checks API keys if they are required; `arrive` admits a request, or refuses it.
    """

    def __init__(
        self,
        app: Any,
        security: PortSecurity,
        origins: Origins,
        keys: KeyCheck | None,
        limits: Limits,
        metrics: HttpMetrics,
        arrive: Callable[[Caller], Visit],
    ) -> None:
        self._app, self._keys, self._limits, self._metrics = app, keys, limits, metrics
        self._origins = origins
        self._arrive = arrive
        self._names = CertificateNames(security.names) if security.names else None
        self._exchanges: set[_Exchange] = set()

    def cut(self) -> None:
        """End what is still being answered, since the server stops."""
        for exchange in self._exchanges:
            exchange.cut()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        path = self._metrics.label(scope["path"])
        exchange = _Exchange(scope, receive, send, self._limits)
        self._metrics.open.labels(path).inc()
        self._exchanges.add(exchange)
        try:
            await self._answer(exchange)
        finally:
            self._exchanges.discard(exchange)
            exchange.close()
            self._metrics.open.labels(path).dec()
            code = LEFT if exchange.left else exchange.code or LEFT
            self._metrics.ended.labels(path, str(code)).inc()
            if exchange.reason:
                why = fields(
                    path=path, code=code, client=exchange.caller().shown, reason=exchange.reason
                )
                errors_returned.info("request ended with an error", extra=why)

    async def _answer(self, exchange: _Exchange) -> None:
        scope = exchange.scope
        try:
            path = scope["path"]
            self._origins.admit(exchange.headers)
            if path not in OPEN and not path.startswith(OPEN_BELOW):
                self._check(scope, exchange.headers)
            exchange.check_head()
            if path in COUNTED and scope["method"] == "POST":
                caller = exchange.caller()
                exchange.visit = self._arrive(caller)
                scope["state"]["caller"] = replace(caller, visit=exchange.visit)
            await self._app(scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:
            stopped = scope["state"].get(STOPPED)
            if not (exchange.left or stopped):
                raise
            exchange.task.uncancel()
            if not exchange.left:
                await exchange.refuse(stopped)
        except FlyspecError as error:
            await exchange.refuse(error)
        except Exception as error:
            log.exception("%s %s failed", scope["method"], scope["path"])
            await exchange.refuse(error)

    def _check(self, scope: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> None:
        """Raises `UnauthenticatedError` or `PermissionDeniedError`."""
        if self._names is not None:
            self._names.admit(scope["state"]["connection"].certificate_names)
        if self._keys is not None:
            given = headers.get(AUTHORIZATION_KEY.encode())
            any_scope = scope["path"].startswith(ANY_SCOPE)
            self._keys.admit(given and given.decode("latin-1"), "header", any_scope)


class _Exchange:
    """A request and its response: `receive` and `send` with limits.

    Once the body is read, a client that leaves cancels the task that answers. `code` is the
    response's, 0 before it begins; `reason` is what an error says.
    """

    def __init__(self, scope: dict[str, Any], receive: Any, send: Any, limits: Limits) -> None:
        self.scope, self._receive, self._send, self._limits = scope, receive, send, limits
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.code, self.left, self._finished = 0, False, False
        self.reason = ""
        self._deadline = asyncio.get_running_loop().time() + REQUEST_TIMEOUT_S
        self._size = 0
        self.visit: Visit | None = None
        self._watch: asyncio.Task[None] | None = None
        self._unread: FlyspecError | None = None  # why the body could not be read
        given = self.headers.get(REQUEST_ID_KEY.encode(), b"").decode("latin-1")
        self._id = given if is_request_id(given) else new_request_id()
        set_request_id(self._id)

    def caller(self) -> Caller:
        client = self.scope["client"]

        def sent(name: str) -> str:
            return self.headers.get(name.encode(), b"").decode("latin-1")

        return Caller(
            address=network_of(client[0]) if client else "",
            client_id=sent(CLIENT_ID_KEY),
            key=key_of_call(),
            request_id=self._id,
            traceparent=sent(TRACEPARENT_KEY),
        )

    def check_head(self) -> None:
        """Raises `TooLargeError`, `UnsupportedEncodingError`."""
        encoding = self.headers.get(b"content-encoding", b"identity").decode("latin-1")
        if encoding.lower() not in ("", "identity"):
            raise UnsupportedEncodingError(
                f"content-encoding: {encoding!r:.100} is not supported; send the body as it is"
            )
        length = self.headers.get(b"content-length", b"")
        if length.isdigit():
            self._check_size(int(length))

    async def receive(self) -> dict[str, Any]:
        if self._watch is not None:
            await asyncio.shield(self._watch)
            return {"type": "http.disconnect"}
        try:
            async with asyncio.timeout_at(self._deadline):
                message: dict[str, Any] = await self._receive()
            self._size += len(message.get("body", b""))
            self._check_size(self._size)
        except TimeoutError:
            self._unread = IdleTimeoutError(
                f"the request's body did not come within {REQUEST_TIMEOUT_S:g} s"
            )
            raise self._unread from None
        except TooLargeError as error:
            self._unread = error
            raise
        if message["type"] == "http.disconnect":
            self.left = True
            raise asyncio.CancelledError
        if not message.get("more_body"):
            self._watch = asyncio.create_task(self._wait_until_left())
        return message

    async def send(self, message: dict[str, Any]) -> None:
        """Raises `DeadlineExceededError` if the client does not read for too long."""
        if self._unread is not None:  # the application calls the body invalid
            if not self.code:
                await self.refuse(self._unread)
            return
        await self._send_in_time(message)

    async def _send_in_time(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.code = message["status"]
            headers = (REQUEST_ID_KEY.encode(), self._id.encode())
            message["headers"] = [*message.get("headers", ()), headers]
        else:
            if self.code >= 400 and (body := message.get("body", b"")).startswith(b'{"error":'):
                self.reason = json.loads(body)["error"]["message"]
            if not message.get("more_body"):
                self._finished = True
        try:
            async with asyncio.timeout(self._limits.write_timeout_s):
                await self._send(message)
        except TimeoutError:
            self.scope["state"]["connection"].abort()
            raise DeadlineExceededError(
                f"the client read nothing for {self._limits.write_timeout_s:g} s; read the "
                "response as it arrives, or raise --write-timeout-s"
            ) from None

    async def refuse(self, error: Exception) -> None:
        """Answer with an error, unless the response has already begun."""
        if self.code:
            log.debug("%s ended: %s", self.scope["path"], error)
            self.scope["state"]["connection"].abort()
            return
        response = response_of(error)
        response.headers["connection"] = "close"  # the rest of the body may still come
        start = {"status": response.status_code, "headers": response.raw_headers}
        await self._send_in_time({"type": "http.response.start", **start})
        body = {"type": "http.response.body", "body": response.body, "more_body": True}
        await self._send_in_time(body)
        if self._watch is None:
            await self._discard()
        await self._send_in_time({"type": "http.response.body", "body": b""})

    async def _discard(self) -> None:
        """Read what is left of the body: clients read an answer only once they have sent it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                while self._size < DISCARD_BYTES:
                    message = await self._receive()
                    if not message.get("more_body"):
                        return
                    self._size += len(message["body"])

    def cut(self) -> None:
        """Cancel the task, which finds the reason in the scope's state."""
        self.scope["state"][STOPPED] = UnavailableError(
            "the server stopped before the end; send the request again"
        )
        self.task.cancel()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self.visit is not None:
            self.visit.end()

    def _check_size(self, size: int) -> None:
        if size > (most := self._limits.max_body_bytes):
            raise TooLargeError(f"the request's body has more than {most} bytes; shorten it")

    async def _wait_until_left(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._finished:  # uvicorn says so at a response's end, too
            self.left = True
            self.task.cancel()
