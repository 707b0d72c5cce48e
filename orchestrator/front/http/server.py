"""Listens for HTTP in the orchestrator's event loop, by uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.middleware.cors import CORSMiddleware

from flyspec.config import HTTP_PORT, OrchestratorSettings
from flyspec.errors import ConfigError
from flyspec.metadata import REQUEST_ID_KEY, RULE_KEY
from flyspec.rule_files import RuleBook
from flyspec.security import ApiKeys, PortSecurity, Scope, watch_server_context
from orchestrator.fleet.fleet import Fleet
from orchestrator.front.access import KeyCheck
from orchestrator.front.http.app import make_app, paths_of
from orchestrator.front.http.connection import HEAD_TIMEOUT_S, HttpConnection
from orchestrator.front.http.gate import HttpGate, HttpMetrics, Limits, Origins
from orchestrator.generations import Generations

log = logging.getLogger(__name__)

SEND_BUFFER_BYTES = 1 << 18
CUT_S = 2.0
"""Seconds that clients get to read why their requests were cut."""
IDLE_S = 75
"""Seconds that a connection is kept without a request; more than the 60 of many proxies."""


class _Server(uvicorn.Server):
    """A server in a loop with signal handlers of its own, and less patience with handshakes."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen as uvicorn does, whose handshakes may take asyncio's 60 seconds."""
        config = self.config

        def connection() -> HttpConnection:
            return HttpConnection(config, self.server_state, self.lifespan.state)

        loop, timeout = asyncio.get_running_loop(), HEAD_TIMEOUT_S if config.ssl else None
        self.servers = [
            await loop.create_server(
                connection, sock=listening, backlog=config.backlog, ssl=config.ssl,
                ssl_handshake_timeout=timeout,
            )
            for listening in sockets or ()
        ]  # fmt: skip
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """A port that serves an ASGI application, with TLS as `security` says.

    It is the first of `ports` that is free. `cut` ends what is still being answered. Raises
    `ConfigError` for bad certificates.
    """

    def __init__(
        self,
        app: Any,
        ports: Sequence[int],
        security: PortSecurity,
        cut: Callable[[], None] = lambda: None,
    ) -> None:
        security.check()
        self._security, self._ports, self._cut = security, ports, cut
        contexts = None
        if security.encrypted:
            contexts = watch_server_context(security, "the HTTP port's certificates")

        def context(*_: object) -> ssl.SSLContext:
            assert contexts is not None
            first = contexts.current()

            def renew(handshake: ssl.SSLObject, *_: object) -> None:
                handshake.context = contexts.current()

            first.sni_callback = renew  # called in every handshake, with or without a name
            return first

        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # the gate logs what matters
        config = uvicorn.Config(
            app,
            http=HttpConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=IDLE_S,
            ssl_context_factory=context if contexts else None,
        )
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listen. Return the bound port. Raises `ConfigError`."""
        *preferred, last = self._ports
        listening = None
        for port in preferred:
            with contextlib.suppress(ConfigError):
                listening = _listen(self._security.host, port)
                break
            log.warning("HTTP port %d is in use, using another; see --http-port", port)
        listening = listening or _listen(self._security.host, last)
        self._serving = asyncio.create_task(self._server.serve([listening]))
        port = int(listening.getsockname()[1])
        log.info("HTTP API at %s:%d", self._security.host, port)
        return port

    async def stop(self, grace_s: float) -> None:
        """Refuse new connections, let requests finish for `grace_s` seconds, then cut them."""
        if self._serving is None:
            return
        self._server.config.timeout_graceful_shutdown = math.ceil(grace_s + CUT_S)
        self._server.should_exit = True
        await asyncio.wait([self._serving], timeout=grace_s)
        self._cut()
        await self._serving
        if running := self._server.server_state.tasks:
            await asyncio.wait(running, timeout=1.0)


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises `ConfigError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Of each connection: what a client that does not read may leave in the kernel.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listening.bind((host.strip("[]"), port))
        listening.listen(2048)
    except (OSError, OverflowError) as error:
        listening.close()
        raise ConfigError(
            f"--http-port {port}: cannot listen on {host}: "
            f"{getattr(error, 'strerror', None) or error}; stop the other process, choose another "
            "port (0 picks a free one), or none (-1)"
        ) from error
    listening.setblocking(False)
    return listening


def make_server(
    generations: Generations,
    fleet: Fleet,
    settings: OrchestratorSettings,
    rules: RuleBook,
    keys: ApiKeys | None,
    max_body_bytes: int,
    registry: CollectorRegistry,
) -> HttpServer:
    """Return a server, not listening yet, with access as on the generation port.

    A port that was not chosen explicitly gives way to a free one.
    """
    security = settings.port_security
    app = make_app(generations, fleet, settings, rules)
    gate = HttpGate(
        app,
        security,
        Origins(settings),
        KeyCheck(keys, Scope.GENERATE) if security.keys and keys is not None else None,
        Limits(max_body_bytes, settings.write_timeout_s),
        HttpMetrics(registry, paths_of(app)),
        lambda caller: generations.arrive(caller),
    )
    served: Any = gate
    if settings.origins:  # outside the gate, since browsers ask without a key whether they may call
        served = CORSMiddleware(
            served, allow_origins=settings.origins, allow_methods=["*"], allow_headers=["*"],
            expose_headers=[REQUEST_ID_KEY, RULE_KEY, "retry-after"],
        )  # fmt: skip
    port = settings.http_port
    if port is not None:
        return HttpServer(served, [port], security, gate.cut)
    return HttpServer(served, [HTTP_PORT, 0] if settings.port else [0], security, gate.cut)
