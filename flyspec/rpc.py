"""What every gRPC server and channel of flyspec has in common: limits, errors, health, drain.

A service builds its servicer and puts it into a `GrpcServer`; a servicer's methods are decorated
with `handler`, which turns `FlyspecError` into its gRPC status.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import grpc
import uvloop
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from flyspec.errors import (
    ConfigError,
    FlyspecError,
    IdleTimeoutError,
    ResourceExhaustedError,
    UnavailableError,
)
from flyspec.malformed import MalformedRequests, check_read

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 32 << 20
# A piece of distributions or of a tokenizer has about a megabyte.
BASE_REQUEST_BYTES = 3 << 20
MAX_ID_BYTES = 5
MAX_STREAMS = 1024
"""Calls at once on one connection, if a server does not say otherwise; more wait at the client."""
# A status travels in a header, 12 bytes a character at worst; gRPC refuses one beyond 8 KiB, and
# the client would see that instead.
MAX_DETAILS_CHARACTERS = 600
# With a google.rpc.Status beside it, the message travels twice.
MAX_RICH_DETAILS_CHARACTERS = 400
ABORT_TIMEOUT_S = 1.0
"""A client that reads nothing does not read its status either."""
# Goes with every status that a flyspec server chose, so that a client can tell its UNAVAILABLE from
# gRPC's own for a lost connection.
SAID = (("flyspec-said", "1"),)
CLIENT_ID_KEY = "flyspec-client-id"
"""Metadata key with a client's name for itself: a claim, which nothing proves."""

# What grpc.aio says when a write meets a stream that has just ended, whatever ended it: it
# overwrites the status that the peer sent (grpc/grpc#36066).
WRITE_FAILED = "Internal error from Core"

# What grpc.aio raises, by a class that it keeps to itself, in a call that reads or writes when the
# grace period of its server is over: a cancellation like any other.
SERVER_STOPPED = "_ServerStoppedError"

BUG = "internal error in"
"""Begins the details of the INTERNAL that a flyspec server says."""

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Every channel has a connection of its own, so that closing it closes the connection.
    ("grpc.use_local_subchannel_pool", 1),
    # Reconnect soon after a service comes back; gRPC's own default backs off to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]
SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Without this two servers can share a port, each getting some of the connections.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    # A client that vanished without a word is noticed, and its sessions are free again.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]


def status_of(error: FlyspecError) -> grpc.StatusCode:
    """The gRPC status code of an error."""
    return grpc.StatusCode[error.status]


def error_of_status(code: grpc.StatusCode, details: str) -> FlyspecError:
    """The error that a peer's status stands for; its message is the peer's."""
    if code is grpc.StatusCode.INTERNAL and details == WRITE_FAILED:
        return UnavailableError("the stream ended while it was written to")
    for cls in FlyspecError.__subclasses__():
        if vars(cls).get("status") == code.name:
            return cls(details)
    return FlyspecError(f"{code.name}: {details}")


def error_of(error: grpc.aio.AioRpcError) -> FlyspecError:
    """The error that a failed call stands for, with when to retry if its server said so."""
    found = error_of_status(error.code(), error.details() or error.code().name)
    if isinstance(found, ResourceExhaustedError):
        found.retry_after_s = _retry_after_s(error)
    return found


def _retry_after_s(error: grpc.aio.AioRpcError) -> float | None:
    """Seconds after which the server said to try again, None if it did not."""
    try:
        status = rpc_status.from_call(error)
    except (ValueError, DecodeError):  # details that contradict the status, or are none
        return None
    for detail in status.details if status else ():
        info = error_details_pb2.RetryInfo()
        if detail.Is(info.DESCRIPTOR) and detail.Unpack(info):
            seconds: float = info.retry_delay.ToTimedelta().total_seconds()
            return seconds
    return None


def was_said(error: grpc.aio.AioRpcError) -> bool:
    """Whether a flyspec server chose this status, rather than gRPC for want of a connection."""
    return any(tuple(item) in SAID for item in error.trailing_metadata() or ())


async def _abort(context: Any, method: str, error: Exception) -> None:
    """End the call with the status that `error` stands for; a bug is logged with its trace."""
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    if isinstance(error, ResourceExhaustedError) and error.retry_after_s is not None:
        rich = _with_retry_info(error)
        code, details, metadata = rich.code, rich.details, (*SAID, *rich.trailing_metadata)
    elif isinstance(error, FlyspecError):
        code, details, metadata = status_of(error), _details(str(error)), SAID
    else:
        log.exception("%s failed", method)
        code = grpc.StatusCode.INTERNAL
        details = _details(f"{BUG} {method}: {error!r}")
    try:
        async with asyncio.timeout(ABORT_TIMEOUT_S):
            await context.abort(code, details, trailing_metadata=metadata)
    except grpc.aio.AbortError:
        raise
    except (TimeoutError, grpc.aio.BaseError) as failure:
        # What was sent is not read, or the call has ended meanwhile, by its deadline for example.
        log.debug("%s: its status %s was not taken: %s", method, code.name, failure)
    # A status follows once what was sent is read; this need not wait for that.
    raise asyncio.CancelledError


def _with_retry_info(error: ResourceExhaustedError) -> Any:
    """The status of an error with google.rpc.RetryInfo beside it."""
    retry = f"; retry in {error.retry_after_s:.3g} s"
    message = _details(str(error), MAX_RICH_DETAILS_CHARACTERS - len(retry)) + retry
    status = status_pb2.Status(code=status_of(error).value[0], message=message)
    info = error_details_pb2.RetryInfo()
    info.retry_delay.FromNanoseconds(round(1e9 * (error.retry_after_s or 0)))
    status.details.add().Pack(info)
    return rpc_status.to_status(status)


def _details(message: str, most: int = MAX_DETAILS_CHARACTERS) -> str:
    """A message short enough for a status: what a client sent may be quoted in its middle."""
    half = most // 2
    if len(message) <= 2 * half:
        return message
    return f"{message[:half]} ... {message[-half:]}"


def handler(method: Callable[..., Awaitable[Any]]) -> Any:
    """Decorate a servicer method: what it raises becomes the call's status.

    For unary methods, and for streams that read and write through their context: leaving such a
    method, cancelled or not, runs its own `finally` at once.
    """

    @functools.wraps(method)
    async def wrapped(self: Any, request: Any, context: Any) -> Any:
        try:
            return await method(self, request, context)
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except grpc.aio.InternalError as error:
            # Something could not be read or written: the call has ended meanwhile.
            log.debug("%s: %s", method.__qualname__, error)
            raise asyncio.CancelledError from error
        except Exception as error:
            if type(error).__name__ == SERVER_STOPPED:
                raise asyncio.CancelledError from error
            await _abort(context, method.__qualname__, error)
            raise

    return wrapped


async def read(context: Any, idle_timeout_s: float) -> Any:
    """The next message of a stream, None at its end; `IdleTimeoutError` when none comes."""
    try:
        async with asyncio.timeout(idle_timeout_s):
            message = await context.read()
    except TimeoutError as error:
        raise IdleTimeoutError(
            f"no message for {idle_timeout_s:g} s; the session is closed, open another"
        ) from error
    check_read(message)
    return None if message is grpc.aio.EOF else message


async def write(context: Any, message: Any, idle_timeout_s: float) -> None:
    """Send a message of a stream; `IdleTimeoutError` when the client does not read for so long."""
    try:
        async with asyncio.timeout(idle_timeout_s):
            await context.write(message)
    except TimeoutError as error:
        raise IdleTimeoutError(
            f"nothing was read for {idle_timeout_s:g} s; the session is closed, open another"
        ) from error


def max_streams(max_sessions: int) -> int:
    """Calls at once on one connection to a service of so many sessions.

    More than it has sessions: who finds none free is told so, instead of waiting unanswered. And
    many more: grpc.aio keeps a stream for as long as the connection if a write met its end while
    answers were still unread.
    """
    return max(MAX_STREAMS, 2 * max_sessions)


def max_request_bytes(max_length: int) -> int:
    """The largest request to a service whose sequences have at most so many tokens.

    To read a message of many small parts takes a second for some megabytes, and holds up everybody.
    """
    return min(MAX_MESSAGE_BYTES, BASE_REQUEST_BYTES + MAX_ID_BYTES * max_length)


def connect(address: str) -> grpc.aio.Channel:
    """Open a channel to `host:port`; it connects on first use and reconnects by itself."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


class GrpcServer:
    """One listening port with health and reflection; not ready until `set_ready`.

    `services` pairs each generated `add_*Servicer_to_server` with a servicer; `names` are the full
    names of those services. `max_streams` bounds the calls at once on one connection,
    `max_request_bytes` a request.
    """

    def __init__(
        self,
        host: str,
        port: int,
        services: list[tuple[Callable[[Any, grpc.aio.Server], None], Any]],
        names: list[str],
        max_streams: int = MAX_STREAMS,
        max_request_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._names = names
        self._port = port
        self._server = grpc.aio.server(
            interceptors=[MalformedRequests(_abort)],
            options=[
                *SERVER_OPTIONS,
                ("grpc.max_receive_message_length", max_request_bytes),
                ("grpc.max_concurrent_streams", max_streams),
            ],
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        for add, servicer in services:
            add(servicer, self._server)
        reflection.enable_server_reflection(
            [*names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server
        )

    async def start(self) -> int:
        """Listen, not ready yet; the port that was bound (0 picks a free one)."""
        try:
            port = self._server.add_insecure_port(self._address)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {self._address}: the port is in use or not allowed; "
                "stop the other process or choose another port (0 picks a free one)"
            ) from error
        await self.set_ready(False)
        await self._server.start()
        self._port = int(port)
        return self._port

    @property
    def port(self) -> int:
        """The port that `start` bound."""
        return self._port

    async def set_ready(self, ready: bool) -> None:
        """Tell health checks whether this server can do its work."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        state = status.SERVING if ready else status.NOT_SERVING
        for name in ["", *self._names]:
            await self._health.set(name, state)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let running ones finish for `grace_s` seconds, then cancel them."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


def announce(ready_fd: int | None, facts: dict[str, Any]) -> None:
    """Tell the process that started this one where it listens: one JSON line on `ready_fd`."""
    if ready_fd is not None:
        with os.fdopen(ready_fd, "w") as pipe:
            pipe.write(json.dumps(facts) + "\n")


def settle_memory() -> None:
    """Keep what loading left behind out of garbage collections, which would hold up a round."""
    gc.collect()
    gc.freeze()


async def wait_for_termination() -> None:
    """Wait for SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a service's main coroutine on uvloop; an error for the user is one line, exit code 2."""
    try:
        uvloop.run(main)
    except FlyspecError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
