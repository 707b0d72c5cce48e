"""Errors and gRPC statuses: what a servicer raises, what a client makes of it."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from flyspec.errors import FlyspecError, ResourceExhaustedError, UnavailableError

log = logging.getLogger(__name__)

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

# What grpc.aio says when a write meets a stream that has just ended, whatever ended it: it
# overwrites the status that the peer sent (grpc/grpc#36066).
WRITE_FAILED = "Internal error from Core"

# What grpc.aio raises, by a class that it keeps to itself, in a call that reads or writes when the
# grace period of its server is over: a cancellation like any other.
SERVER_STOPPED = "_ServerStoppedError"

BUG = "internal error in"
"""Begins the details of the INTERNAL that a flyspec server says."""


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


async def abort(context: Any, method: str, error: Exception) -> None:
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
            await abort(context, method.__qualname__, error)
            raise

    return wrapped
