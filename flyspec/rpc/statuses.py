"""Maps errors to gRPC statuses and back."""

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

# A status is a header of up to 12 bytes per character; gRPC replaces one beyond 8 KiB by an error.
MAX_DETAILS_CHARACTERS = 600
# With a google.rpc.Status, the message is sent twice.
MAX_RICH_DETAILS_CHARACTERS = 400
ABORT_TIMEOUT_S = 1.0
"""A client that reads nothing does not read its status either."""
# Sent with every status chosen by a flyspec server, to tell its UNAVAILABLE from gRPC's own for a
# lost connection.
SAID = (("flyspec-said", "1"),)

# Details from grpc.aio when a write meets a stream that has just ended, for whatever reason: they
# overwrite the status that the peer sent (grpc/grpc#36066).
WRITE_FAILED = "Internal error from Core"

# Private class that grpc.aio raises in a running call when the server's grace period is over;
# equivalent to a cancellation.
SERVER_STOPPED = "_ServerStoppedError"

BUG = "internal error in"
"""Start of the details of a flyspec server's INTERNAL status."""


def error_of_status(code: grpc.StatusCode, details: str) -> FlyspecError:
    """Return the error for a peer's status, with the peer's message."""
    if code is grpc.StatusCode.INTERNAL and details == WRITE_FAILED:
        return UnavailableError("the stream ended during a write")
    if code is grpc.StatusCode.CANCELLED:  # not by us: that raises no status
        return UnavailableError(f"the server cancelled the call: {details}")
    for cls in FlyspecError.__subclasses__():  # not theirs, which say more than the status
        if vars(cls).get("status") == code.name:
            return cls(details)
    return FlyspecError(f"{code.name}: {details}")


def error_of(error: grpc.aio.AioRpcError) -> FlyspecError:
    """Return the error for a failed call, with the server's retry delay if it sent one."""
    found = error_of_status(error.code(), error.details() or error.code().name)
    if isinstance(found, ResourceExhaustedError):
        found.retry_after_s = _retry_after_s(error)
    return found


def _retry_after_s(error: grpc.aio.AioRpcError) -> float | None:
    try:
        status = rpc_status.from_call(error)
    except (ValueError, DecodeError):  # details that contradict the status or are malformed
        return None
    for detail in status.details if status else ():
        info = error_details_pb2.RetryInfo()
        if detail.Is(info.DESCRIPTOR) and detail.Unpack(info):
            seconds: float = info.retry_delay.ToTimedelta().total_seconds()
            return seconds
    return None


def was_said(error: grpc.aio.AioRpcError) -> bool:
    """True if a flyspec server sent this status, rather than gRPC for a lost connection."""
    return any(tuple(item) in SAID for item in error.trailing_metadata() or ())


async def abort(context: Any, method: str, error: Exception) -> None:
    """End the call with the status for `error`; a bug is logged with its traceback."""
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    if isinstance(error, ResourceExhaustedError) and error.retry_after_s is not None:
        rich = _with_retry_info(error)
        code, details, metadata = rich.code, rich.details, (*SAID, *rich.trailing_metadata)
    elif isinstance(error, FlyspecError):
        code, details, metadata = grpc.StatusCode[error.status], _details(str(error)), SAID
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
        # The client does not read, or the call has ended, for example by its deadline.
        log.debug("%s: status %s not delivered: %s", method, code.name, failure)
    raise asyncio.CancelledError


def _with_retry_info(error: ResourceExhaustedError) -> Any:
    """Return the status of an error, with google.rpc.RetryInfo."""
    retry = f"; retry in {error.retry_after_s:.3g} s"
    message = _details(str(error), MAX_RICH_DETAILS_CHARACTERS - len(retry)) + retry
    status = status_pb2.Status(code=grpc.StatusCode[error.status].value[0], message=message)
    info = error_details_pb2.RetryInfo()
    info.retry_delay.FromNanoseconds(round(1e9 * (error.retry_after_s or 0)))
    status.details.add().Pack(info)
    return rpc_status.to_status(status)


def _details(message: str, most: int = MAX_DETAILS_CHARACTERS) -> str:
    """Shorten a message for a status by its middle, which may quote a client's input."""
    half = most // 2
    if len(message) <= 2 * half:
        return message
    return f"{message[:half]} ... {message[-half:]}"


def handler(method: Callable[..., Awaitable[Any]]) -> Any:
    """Decorate a servicer method: exceptions become the call's status.

    For unary methods, and for streams that read and write through their context (not generators,
    whose `finally` would run late).
    """

    @functools.wraps(method)
    async def wrapped(self: Any, request: Any, context: Any) -> Any:
        try:
            return await method(self, request, context)
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except grpc.aio.InternalError as error:
            # A read or write failed: the call has ended.
            log.debug("%s: %s", method.__qualname__, error)
            raise asyncio.CancelledError from error
        except Exception as error:
            if type(error).__name__ == SERVER_STOPPED:
                raise asyncio.CancelledError from error
            await abort(context, method.__qualname__, error)
            raise

    return wrapped
