"""The port that Prometheus scrapes: `/metrics`, in the clear or over TLS, in threads of its own.

It answers while the event loop is busy, and a client that connects and says nothing holds up
nobody: over TLS too, the handshake is the connection's own thread's business.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from flyspec.errors import ConfigError
from flyspec.security import SYSTEM, PortSecurity
from flyspec.security.certificates import read_certificates
from flyspec.security.watched_files import Watched

PATH = "/metrics"
SILENCE_S = 10.0
"""A connection that says nothing, or reads nothing, for so long is closed."""


class PortTakenError(ConfigError):
    """Nothing can listen there."""


class MetricsPort:
    """A listening port; `close` ends it. `port` 0 picks a free one.

    Over TLS if `security` has certificates, with those of clients if it wants them; the files are
    read again when they change. Raises `ConfigError`.
    """

    def __init__(self, security: PortSecurity, port: int, registry: CollectorRegistry) -> None:
        host = security.host
        server = _server_class(security)
        try:
            self._server = make_server(host, port, _only_metrics(registry), server, _Handler)
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
        """The port that is bound."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(WSGIRequestHandler):
    timeout = SILENCE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not worth a line each."""


def _server_class(security: PortSecurity) -> type[WSGIServer]:
    """A server that answers each connection in a thread, over TLS if there are files for it."""
    contexts = _watch_context(security) if security.encrypted else None
    family = socket.AF_INET6 if ":" in security.host else socket.AF_INET

    class Server(ThreadingMixIn, WSGIServer):
        address_family = family
        daemon_threads = True
        request_queue_size = 128

        def server_bind(self) -> None:
            """As the base class, without asking the DNS for this host's name."""
            TCPServer.server_bind(self)
            self.server_name, self.server_port = security.host, self.server_address[1]
            self.setup_environ()

        def get_request(self) -> tuple[Any, Any]:
            connection, address = super().get_request()
            if contexts is None:
                return connection, address
            connection.settimeout(SILENCE_S)
            # The handshake comes with the first read, in the connection's own thread.
            return contexts.current().wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            ), address

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that goes away, or does not get through the handshake, is no event here."""

    return Server


def _watch_context(security: PortSecurity) -> Watched[ssl.SSLContext]:
    """What connections are accepted with, as the files are now. Raises `ConfigError`."""
    files = security.files

    def make() -> ssl.SSLContext:
        read_certificates(files)  # says what is wrong with them
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(files.certfile, files.keyfile)
            if security.wants_certificates:
                context.verify_mode = ssl.CERT_REQUIRED
                if files.ca_certs == SYSTEM:
                    context.load_default_certs(ssl.Purpose.CLIENT_AUTH)
                else:
                    context.load_verify_locations(files.ca_certs)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"metrics port: the certificates cannot be used: {error}") from error
        return context

    return Watched("the metrics port's certificates", files.paths, make)


def _only_metrics(registry: CollectorRegistry) -> Callable[..., Iterable[bytes]]:
    """prometheus_client's application at `PATH`, 404 elsewhere."""
    metrics = make_wsgi_app(registry)

    def application(environ: Any, start_response: Any) -> Iterable[bytes]:
        if environ.get("PATH_INFO") == PATH:
            answer: Iterable[bytes] = metrics(environ, start_response)
            return answer
        start_response("404 Not Found", [("Content-Type", "text/plain")])
        return [f"metrics are at {PATH}\n".encode()]

    return application
