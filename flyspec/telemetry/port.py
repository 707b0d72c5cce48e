"""The port that Prometheus scrapes: `/metrics`, plaintext or TLS, one thread per connection.

So it answers while the event loop is busy, and a silent client delays nobody, even during the TLS
handshake.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from flyspec.errors import ConfigError
from flyspec.security import PortSecurity, is_loopback, watch_server_context
from flyspec.security.hosts import is_served

PATH = "/metrics"
SILENCE_S = 10.0
"""Seconds after which a connection that sends or reads nothing is closed."""


class PortTakenError(ConfigError):
    """The port is not available."""


class MetricsPort:
    """A listening port; 0 picks a free one. Raises `ConfigError`.

    With TLS, and client certificates, as `security` says; files are reloaded when they change.
    """

    def __init__(self, security: PortSecurity, port: int, registry: CollectorRegistry) -> None:
        host = security.host
        server = _server_class(security)
        try:
            self._server = make_server(
                host, port, _only_metrics(registry, security), server, _Handler
            )
        except (OSError, OverflowError) as error:
            raise PortTakenError(
                f"--metrics-port {port}: cannot listen on {host}: "
                f"{getattr(error, 'strerror', None) or error}; stop the other process, choose "
                "another port (0 picks a free one), or none (-1)"
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(WSGIRequestHandler):
    timeout = SILENCE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log every scrape."""


def _server_class(security: PortSecurity) -> type[WSGIServer]:
    """Return a server class with a thread per connection, and TLS if there are certificates."""
    contexts = None
    if security.encrypted:
        contexts = watch_server_context(security, "the metrics port's certificates")
    family = socket.AF_INET6 if ":" in security.host else socket.AF_INET

    class Server(ThreadingMixIn, WSGIServer):
        address_family = family
        daemon_threads = True
        request_queue_size = 128

        def server_bind(self) -> None:
            """Bind like the base class, but without a DNS lookup of the host name."""
            TCPServer.server_bind(self)
            self.server_name, self.server_port = security.host, self.server_address[1]
            self.setup_environ()

        def get_request(self) -> tuple[Any, Any]:
            connection, address = super().get_request()
            if contexts is None:
                return connection, address
            connection.settimeout(SILENCE_S)
            # The handshake happens at the first read, in the connection's own thread.
            return contexts.current().wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            ), address

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Ignore clients that disconnect or fail the handshake."""

    return Server


def _only_metrics(
    registry: CollectorRegistry, security: PortSecurity
) -> Callable[..., Iterable[bytes]]:
    """Return prometheus_client's application at `PATH`, and 404 elsewhere.

    On loopback it is called by IP address or `localhost`: other names are those of web pages.
    """
    metrics = make_wsgi_app(registry)
    names = [security.host] if is_loopback(security.host) else ["*"]

    def application(environ: Any, start_response: Any) -> Iterable[bytes]:
        host = environ.get("HTTP_HOST", "")
        if host and not is_served(host, names):
            start_response("403 Forbidden", [("Content-Type", "text/plain")])
            return [b"call this port by its IP address\n"]
        if environ.get("PATH_INFO") == PATH:
            answer: Iterable[bytes] = metrics(environ, start_response)
            return answer
        start_response("404 Not Found", [("Content-Type", "text/plain")])
        return [f"metrics are at {PATH}\n".encode()]

    return application
