"""The protocols: gRPC through synchronous stubs, and OpenAI's API over HTTP/1.1 by the client of
locust's own fast users. gevent makes both cooperative.

Another protocol is another `loadtest.load.Transport`, named in `TRANSPORTS`.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from itertools import cycle
from typing import Any, Literal
from urllib.parse import urlsplit

import gevent
import gevent.ssl
import grpc
from geventhttpclient import HTTPClient
from google.protobuf import json_format

from flyspec import rpc, wire
from flyspec.addresses import split_address
from flyspec.client import Chat, Credentials, GenerateOptions, Models, Prompt, Status
from flyspec.errors import (
    ConfigError,
    DeadlineExceededError,
    FlyspecError,
    ResourceExhaustedError,
    UnavailableError,
)
from flyspec.security.certificates import SYSTEM
from flyspec.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc
from flyspec.values.admin import ModelInfo
from flyspec.values.requests import GenerationRequest
from loadtest.load import StreamEnd, TokenStream, Transport

ANSWER_S, STATUS_S = 10.0, 60.0
"""Time for an answer about the target, and about all services."""
CHANNELS = 4
"""gRPC connections to each address, which requests share."""
CONNECTIONS = 1 << 20
"""HTTP connections to each address: as many as requests under way."""
BLOCK_BYTES = 1 << 16
BY_CODE = {error.status.lower(): error for error in reversed(FlyspecError.__subclasses__())}
"""Errors by the code in a body, the first of each."""
_JSON = {"content-type": "application/json"}
_ASKED = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}


def ended_early() -> UnavailableError:
    return UnavailableError("the server ended the stream without a completion")


# --- gRPC -------------------------------------------------------------------------------------


def connect(address: str, credentials: Credentials) -> grpc.Channel:
    """Return a channel of its own connection, opened on first use.

    Raises `ConfigError` for files that cannot be used.
    """
    security = credentials.security(address)
    options: list[tuple[str, int | str]] = [*rpc.CHANNEL_OPTIONS]
    if security is None:
        return grpc.insecure_channel(address, options=options)
    if security.target_name:
        options.append(("grpc.ssl_target_name_override", security.target_name))
    return grpc.secure_channel(address, security.credentials, options=options)


def status_at(address: str, credentials: Credentials) -> Status:
    """Return the state of the orchestrator with this admin port, and of the services behind it.

    Raises `FlyspecError`.
    """
    request, metadata = admin_pb2.GetStatusRequest(), credentials.metadata()
    with connect(address, credentials) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        try:
            found = stub.GetStatus(request, timeout=STATUS_S, metadata=metadata)
        except grpc.RpcError as error:
            raise FlyspecError(f"GetStatus: {rpc.error_of(error)}") from None
    return wire.decode(Status, found)


class GrpcTransport:
    """Several channels to each address, which take turns.

    Raises `ConfigError` for addresses and files that cannot be used.
    """

    def __init__(self, addresses: Sequence[str], credentials: Credentials) -> None:
        self._metadata = credentials.metadata()
        self._channels = [connect(a, credentials) for _ in range(CHANNELS) for a in addresses]
        self._stubs = [generation_pb2_grpc.GenerationServiceStub(c) for c in self._channels]
        self._turns = cycle(self._stubs)

    def stream(self, prompt: Prompt, options: GenerateOptions) -> TokenStream:
        request, stub = wire.encode(GenerationRequest(prompt, options)), next(self._turns)
        call: Any = stub.Generate(request, timeout=options.timeout_s, metadata=self._metadata)
        try:
            for response in call:
                match response.WhichOneof("response"):
                    case "chunk":  # not decoded: the generator has to be fast
                        yield response.chunk.token_ids
                    case "completion":
                        ended = wire.unwrap(response)
                        yield StreamEnd(ended.completion_tokens, ended.speculation.num_rounds)
                        return
        except grpc.RpcError as error:
            raise rpc.error_of(error) from None
        finally:
            call.cancel()
        raise ended_early()

    def target(self) -> ModelInfo:
        request, stub = generation_pb2.ListModelsRequest(), self._stubs[0]
        try:
            response = stub.ListModels(request, timeout=ANSWER_S, metadata=self._metadata)
        except grpc.RpcError as error:
            raise rpc.error_of(error) from None
        return wire.decode(Models, response).target

    def close(self) -> None:
        for channel in self._channels:
            channel.close()


# --- HTTP -------------------------------------------------------------------------------------


class HttpTransport:
    """A connection for each request under way, kept open; addresses take turns.

    Raises `ConfigError` for addresses and files that cannot be used.
    """

    def __init__(self, addresses: Sequence[str], credentials: Credentials) -> None:
        self._headers = dict(credentials.metadata())
        self._clients = [_client(address, credentials, CONNECTIONS) for address in addresses]
        # It sends a GET again as often as it has connections.
        self._asking = _client(addresses[0], credentials, 1)
        self._turns = cycle(self._clients)

    def stream(self, prompt: Prompt, options: GenerateOptions) -> TokenStream:
        (path, body), client = request_of(prompt, options), next(self._turns)
        headers, end = self._headers | _JSON, None
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
            raise ended_early()
        yield end

    def target(self) -> ModelInfo:
        with _in_time(ANSWER_S):
            response = self._asking.get("/v1/models", self._headers)
            if response.status_code != 200:
                raise error_of_response(response)
            return target_of(bytes(response.read()))

    def close(self) -> None:
        for client in (*self._clients, self._asking):
            client.close()


ProtocolName = Literal["grpc", "http"]
TRANSPORTS: Mapping[ProtocolName, Callable[[Sequence[str], Credentials], Transport]] = {
    "grpc": GrpcTransport,
    "http": HttpTransport,
}


@contextmanager
def _in_time(timeout_s: float | None) -> Iterator[None]:
    """Raise `DeadlineExceededError` in the block after that time; translate transport errors."""
    late = DeadlineExceededError(f"not done after {timeout_s} s")
    try:
        with gevent.Timeout(timeout_s, late):
            yield
    except (OSError, HTTPException) as error:
        raise UnavailableError(str(error) or repr(error)) from None


def http_url(address: str, credentials: Credentials) -> str:
    """Return the base URL of the HTTP API there, `https` if the credentials have TLS.

    The address may begin with the scheme. Raises `ConfigError` for one that contradicts the
    credentials, and for files that cannot be used.
    """
    scheme = "https" if credentials.security(address) else "http"
    rest = address.removeprefix(f"{scheme}://")
    if split_address(rest) is None:
        more = "" if scheme == "https" else "; give --ssl-ca-certs for https"
        raise ConfigError(f"--address {address}: not {scheme}://HOST:PORT{more}")
    return f"{scheme}://{rest}"


def _client(address: str, credentials: Credentials, connections: int) -> HTTPClient:
    url, tls = http_url(address, credentials), dict[str, Any]()
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


# --- OpenAI's API -----------------------------------------------------------------------------


def request_of(prompt: Prompt, options: GenerateOptions) -> tuple[str, bytes]:
    """Return the path and body of a request with the options that load tests set."""
    chat = isinstance(prompt, Chat)
    speculation = wire.encode(GenerationRequest("", options)).speculation
    body: dict[str, Any] = {
        **_ASKED, "seed": options.seed, "max_tokens": options.max_tokens,
        "ignore_eos": options.ignore_eos, "temperature": options.sampling.temperature,
        "top_p": options.sampling.top_p, "speculation": json_format.MessageToDict(speculation),
    }  # fmt: skip
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
