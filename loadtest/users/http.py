"""OpenAI's API over HTTP/1.1, by the client of locust's own fast users."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from http.client import HTTPException
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import gevent
import gevent.ssl
from gevent.pool import Group
from gevent.queue import SimpleQueue
from geventhttpclient import HTTPClient

from flyspec.client import Credentials, GenerateOptions, Models, Prompt
from flyspec.errors import ConfigError, DeadlineExceededError, FlyspecError, UnavailableError
from flyspec.security.certificates import SYSTEM
from loadtest.connection import Endpoint
from loadtest.transport import StreamEnd
from loadtest.users.openai import error_of_response, models_of, pieces_of, request_of

UNLIMITED = 1 << 20
BLOCK_BYTES = 1 << 16
_JSON = {"content-type": "application/json"}


class HttpStream:
    """A streamed response, read by a greenlet: whatever that waits for, it can be killed there."""

    def __init__(self, running: Group, client: HTTPClient, *asked: Any) -> None:
        self._pieces = SimpleQueue()
        self._greenlet = running.spawn(self._read, client, *asked)

    def __iter__(self) -> Iterator[Sequence[int] | StreamEnd]:
        while True:
            piece = self._pieces.get()
            if isinstance(piece, Exception):
                raise piece
            yield piece
            if isinstance(piece, StreamEnd):
                return

    def cancel(self) -> None:
        """Close the connection: HTTP/1.1 has no other way."""
        self._greenlet.kill(block=False)
        self._pieces.put(UnavailableError("the client gave it up"))

    def _read(
        self,
        client: HTTPClient,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        timeout_s: float | None,
    ) -> None:
        try:
            with _in_time(timeout_s), client.post(path, body, headers) as response:
                if response.status_code != 200:
                    code, retry_after = response.status_code, response.get("retry-after")
                    raise error_of_response(code, retry_after, response.read())
                while event := response.readline(b"\n\n"):
                    for piece in pieces_of(event):
                        self._pieces.put(piece)
            raise UnavailableError("the server ended the stream without a completion")
        except Exception as error:  # nobody reads it after the end
            self._pieces.put(error)


class HttpTransport:
    """At most so many `connections` to each endpoint, kept open; endpoints take turns.

    Raises `ConfigError` for addresses and files that cannot be used.
    """

    def __init__(self, endpoints: Sequence[Endpoint], connections: int | None = None) -> None:
        self._endpoints = endpoints
        self._clients = [_client(e, connections or UNLIMITED) for e in endpoints]
        self._headers = [dict(e.metadata) for e in endpoints]
        self._running = Group()
        self._turns = count()

    def open(self, prompt: Prompt, options: GenerateOptions) -> HttpStream:
        path, body = request_of(prompt, options)
        turn = next(self._turns) % len(self._clients)
        client, headers = self._clients[turn], _JSON | self._headers[turn]
        return HttpStream(self._running, client, path, body, headers, options.timeout_s)

    def list_models(self, timeout_s: float = 10.0) -> Models:
        first = self._endpoints[0]
        try:
            # The client sends a GET again as often as it has connections.
            with _in_time(timeout_s), closing(_client(first, 1)) as client:
                response = client.get("/v1/models", self._headers[0])
                body = bytes(response.read())
                if response.status_code != 200:
                    raise error_of_response(response.status_code, None, body)
            return models_of(body)
        except FlyspecError as error:
            raise FlyspecError(f"{first.address} does not answer: {error}") from None

    def close(self) -> None:
        self._running.kill()
        for client in self._clients:
            client.close()


@contextmanager
def _in_time(timeout_s: float | None) -> Iterator[None]:
    """Raise `DeadlineExceededError` in the block after that time; translate transport errors."""
    late = DeadlineExceededError(f"not done after {timeout_s} s")
    try:
        with gevent.Timeout(timeout_s, late):
            yield
    except (OSError, HTTPException) as error:
        raise UnavailableError(str(error) or repr(error)) from None


def _client(endpoint: Endpoint, connections: int) -> HTTPClient:
    parts = urlsplit(endpoint.http_url())
    assert parts.hostname is not None
    # Deadlines are those of requests.
    more: dict[str, Any] = {"connection_timeout": None, "network_timeout": None}
    if parts.scheme == "https":
        context = _context(endpoint.credentials)
        name = endpoint.credentials.ssl_target_name or parts.hostname
        more |= {
            "ssl": True,
            "ssl_options": {"server_hostname": name},
            "ssl_context_factory": lambda **_: context,
        }
    return HTTPClient(
        parts.hostname, parts.port, concurrency=connections, block_size=BLOCK_BYTES, **more
    )


def _context(credentials: Credentials) -> ssl.SSLContext:
    """Return the TLS context: gevent's, whether or not the standard library is patched."""
    context: ssl.SSLContext = gevent.ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if credentials.ssl_ca_certs == SYSTEM:
            context.load_default_certs()
        else:
            context.load_verify_locations(credentials.ssl_ca_certs)
        if credentials.ssl_certfile:
            context.load_cert_chain(credentials.ssl_certfile, credentials.ssl_keyfile)
    except OSError as error:  # http_url() has checked the files
        raise ConfigError(f"the certificates cannot be used: {error}") from None
    return context
