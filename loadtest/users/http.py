"""OpenAI's API over HTTP/1.1, by the client of locust's own fast users."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from http.client import HTTPException
from itertools import cycle
from typing import Any
from urllib.parse import urlsplit

import gevent
import gevent.ssl
from geventhttpclient import HTTPClient
from google.protobuf import json_format

from flyspec import wire
from flyspec.client import Chat, Credentials, GenerateOptions, Prompt
from flyspec.errors import (
    ConfigError,
    DeadlineExceededError,
    FlyspecError,
    ResourceExhaustedError,
    UnavailableError,
)
from flyspec.security.certificates import SYSTEM
from flyspec.values.admin import ModelInfo
from flyspec.values.requests import GenerationRequest
from loadtest.load import StreamEnd, TokenStream
from loadtest.options import Endpoint

UNLIMITED = 1 << 20
BLOCK_BYTES = 1 << 16
ANSWER_S = 10.0
BY_CODE = {error.status.lower(): error for error in reversed(FlyspecError.__subclasses__())}
"""Errors by the code in a body, the first of each."""
_JSON = {"content-type": "application/json"}
_ASKED = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}


class HttpTransport:
    """A connection for each request under way, kept open; endpoints take turns.

    Raises `ConfigError` for addresses and files that cannot be used.
    """

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._first = endpoints[0]
        self._clients = [_client(endpoint, UNLIMITED) for endpoint in endpoints]
        headers = [_JSON | dict(e.credentials.metadata()) for e in endpoints]
        self._turns = cycle(zip(self._clients, headers, strict=True))

    def stream(self, prompt: Prompt, options: GenerateOptions) -> TokenStream:
        (path, body), (client, headers) = request_of(prompt, options), next(self._turns)
        end = None
        with _in_time(options.timeout_s), client.post(path, body, headers) as response:
            if response.status_code != 200:
                raise error_of_response(response)
            while event := response.readline(b"\n\n"):
                data = event.removeprefix(b"data:").strip()
                for piece in pieces_of(data) if data != b"[DONE]" else ():
                    if isinstance(piece, StreamEnd):
                        end = piece
                    else:
                        yield piece
        if end is None:
            raise UnavailableError("the server ended the stream without a completion")
        yield end

    def target(self) -> ModelInfo:
        first = self._first
        try:
            # The client sends a GET again as often as it has connections.
            with _in_time(ANSWER_S), closing(_client(first, 1)) as client:
                response = client.get("/v1/models", dict(first.credentials.metadata()))
                if response.status_code != 200:
                    raise error_of_response(response)
                return target_of(bytes(response.read()))
        except FlyspecError as error:
            raise FlyspecError(f"{first.address} does not answer: {error}") from None

    def close(self) -> None:
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
    url, credentials = endpoint.http_url(), endpoint.credentials
    tls: dict[str, Any] = {}
    if url.startswith("https"):
        context = _context(credentials)
        name = credentials.ssl_target_name or urlsplit(url).hostname
        tls = {
            "ssl_options": {"server_hostname": name},
            "ssl_context_factory": lambda **_: context,
        }
    return HTTPClient.from_url(  # deadlines are those of requests
        url, concurrency=connections, block_size=BLOCK_BYTES, connection_timeout=None,
        network_timeout=None, **tls,
    )  # fmt: skip


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


# --- the API ----------------------------------------------------------------------------------


def request_of(prompt: Prompt, options: GenerateOptions) -> tuple[str, bytes]:
    """Return the path and body of a request with the options that load tests set."""
    chat = isinstance(prompt, Chat)
    speculation = wire.encode(GenerationRequest("", options)).speculation
    body: dict[str, Any] = {
        **_ASKED, "seed": options.seed, "max_tokens": options.max_tokens,
        "ignore_eos": options.ignore_eos, "temperature": options.sampling.temperature,
        "top_p": options.sampling.top_p, "speculation": json_format.MessageToDict(speculation),
    }  # fmt: skip
    if options.logprobs is not None:
        count = options.logprobs
        body |= {"logprobs": True, "top_logprobs": count} if chat else {"logprobs": count}
    if isinstance(prompt, Chat):
        body["messages"] = prompt.messages
    else:
        body["prompt"] = prompt if isinstance(prompt, str) else [*prompt]
    given = {name: value for name, value in body.items() if value is not None}
    return "/v1/chat/completions" if chat else "/v1/completions", json.dumps(given).encode()


def pieces_of(data: bytes) -> Iterator[Sequence[int] | StreamEnd]:
    """Yield the tokens of an event, or the end. Raises `FlyspecError` for an error, or no JSON."""
    document = _parsed(data)
    if error := document.get("error"):
        raise BY_CODE.get(error.get("code"), FlyspecError)(str(error.get("message")))
    for choice in document.get("choices", ()):
        if token_ids := choice.get("token_ids"):
            yield token_ids
    if usage := document.get("usage"):
        counts = document.get("metrics", {}).get("speculative_decoding", {})
        rounds = counts.get("num_spec_steps", 0) + counts.get("num_plain_tokens", 0)
        yield StreamEnd(usage["completion_tokens"], rounds)


def error_of_response(response: Any) -> FlyspecError:
    """Return the error that a response stands for."""
    status, body = response.status_code, bytes(response.read())
    try:
        error = json.loads(body)["error"]
        message, code = error["message"], error.get("code")
    except (ValueError, LookupError, TypeError, AttributeError):
        message, code = body[:200].decode(errors="replace").strip() or "no message", None
    if status == 429:
        after = str(response.get("retry-after"))
        return ResourceExhaustedError(message, float(after) if after.isdecimal() else None)
    return BY_CODE[code](message) if code in BY_CODE else FlyspecError(f"HTTP {status}: {message}")


def target_of(body: bytes) -> ModelInfo:
    """Return the target in a list of models. Raises `FlyspecError`."""
    try:
        first, *_ = _parsed(body)["data"]
        return ModelInfo(first.get("root", first["id"]), "", 0, first.get("max_model_len", 0))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FlyspecError(f"/v1/models: not a list of models: {error!r}") from None


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise FlyspecError(f"not a JSON object: {data[:100]!r}")
    return document
