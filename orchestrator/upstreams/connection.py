"""A gRPC connection to a draft or verify service, and calls over it.

Every call has a timeout, and errors name the service.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, ClassVar, Generic, TypeVar

import grpc

from flyspec import rpc, wire
from flyspec.errors import (
    DeadlineExceededError,
    FlyspecError,
    InvalidArgumentError,
    PrefixMismatchError,
    UnavailableError,
    UnimplementedError,
)
from flyspec.values.admin import DraftServiceInfo, VerifyServiceInfo
from flyspec.values.generation import SpeculationMetrics
from flyspec.values.rounds import DraftOpen, VerifyOpen
from orchestrator.upstreams.proposal_checks import DrafterFaultError
from orchestrator.upstreams.protocol import UNKNOWN, Correlation, SilentError, UnreadableError

DESCRIBE_TIMEOUT_S = 5.0

T = TypeVar("T")
Info = TypeVar("Info", DraftServiceInfo, VerifyServiceInfo)
Open = TypeVar("Open", DraftOpen, VerifyOpen)


class GrpcUpstream(Generic[Info]):
    """A service at an address; `timeout_s` applies to each answer.

    `link` is the connection, unencrypted by default.
    """

    service: ClassVar[str]
    """The kind of service, for error messages."""
    _stub: ClassVar[type[Any]]
    _describe: ClassVar[type[Any]]
    _info: type[Info]

    def __init__(self, address: str, timeout_s: float, link: rpc.Link | None = None) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._link = link or rpc.Link(address)
        self._made: tuple[Any, Any] = (None, None)

    @property
    def stub(self) -> Any:
        channel = self._link.channel
        if self._made[0] is not channel:
            self._made = channel, self._stub(channel)
        return self._made[1]

    def attempt(self, timeout_s: float) -> Attempt:
        return Attempt(self.service, self.address, timeout_s)

    async def describe(self, timeout_s: float = DESCRIBE_TIMEOUT_S) -> Info:
        async with self.attempt(timeout_s):
            said = await self.stub.Describe(self._describe_request())
            info: Info = decoded(self._info, said)
            return info

    def _describe_request(self) -> Any:
        return self._describe()

    async def reconnect(self) -> None:
        """Drop the connection; gRPC's keepalive would notice a dead one only after 30 seconds."""
        await self._link.close()

    async def close(self) -> None:
        await self._link.close()


@dataclass(eq=False)
class GrpcSession(Generic[Open]):
    """One generation's stream to a service; the opening message's `token_ids` are filled in.

    The first `_synced` tokens of the service's sequence and of ours agree.
    """

    _method: ClassVar[str]

    _upstream: Any
    _open: Open
    _metrics: SpeculationMetrics
    _correlation: Correlation = UNKNOWN
    _call: Any = field(default=None, init=False)
    _synced: int = field(default=0, init=False)

    async def _begin(self, tokens: Sequence[int], **changes: Any) -> None:
        """Open the stream if it is not open yet; `changes` are applied to the opening message."""
        if self._call is None:
            method = getattr(self._upstream.stub, self._method)
            self._call = method(metadata=self._correlation.metadata)
            open_ = replace(self._open, token_ids=tokens, **changes)
            await write(self._call, wire.encode(open_))
            self._synced = len(tokens)

    def close(self) -> None:
        if self._call is not None:
            self._call.cancel()


class Attempt:
    """A context that turns gRPC errors and timeouts into `FlyspecError`.

    Those where a retry may succeed become `UnavailableError`: a lost connection, an ended stream,
    no answer within `timeout_s` seconds.
    """

    __slots__ = ("_address", "_timeout", "_what")

    def __init__(self, what: str, address: str, timeout_s: float) -> None:
        self._what, self._address = what, address
        self._timeout = asyncio.timeout(timeout_s)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError as timeout:
            error = timeout
        if isinstance(error, asyncio.CancelledError) and not _cancelled():
            # gRPC raises this when our side cancelled the stream (`GrpcSession.close`).
            error = UnavailableError("the stream was closed")
            raise self._named(error)
        if isinstance(error, Exception):
            named = self._named(error)
            if named is not error:
                raise named from error

    def _named(self, error: Exception) -> Exception:
        """Return `error` with the service named, or unchanged if there is nothing to add."""
        service = f"{self._what} at {self._address}"
        if isinstance(error, TimeoutError):
            return SilentError(f"{service} did not answer in time")
        if isinstance(error, grpc.aio.UsageError):
            return UnavailableError(f"{service}: the stream ended: {error}")
        said = error
        if isinstance(error, grpc.aio.AioRpcError):
            said = error_of_end(error.code(), error.details() or "")
        if isinstance(said, DeadlineExceededError):  # the session expired; the service is healthy
            return PrefixMismatchError(f"{service}: {said}")
        if isinstance(said, DrafterFaultError):
            return DrafterFaultError(said.fault, f"{service} {said}")
        if isinstance(said, UnavailableError | UnimplementedError):
            return type(said)(f"{service}: {said}")
        return said


def _cancelled() -> bool:
    """Return whether the current task is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def write(call: Any, message: Any) -> None:
    """Send a message. If the stream has ended, raises the reason."""
    try:
        await call.write(message)
    except asyncio.InvalidStateError:
        raise await _stream_error(call) from None


async def read(call: Any) -> Any:
    """Return the next message. If the stream has ended, raises the reason."""
    try:
        message = await rpc.unbroken(call.read())
    except asyncio.CancelledError:
        call.cancel()  # like grpc.aio: a later answer could not be told apart from this one
        raise
    if message is grpc.aio.EOF:
        raise await _stream_error(call)
    return _readable(message)


def decoded(cls: type[T], message: Any, **known: Any) -> T:
    """Return the value of a message. Raises `UnreadableError` for one that has none."""
    try:
        return wire.decode(cls, _readable(message), **known)
    except InvalidArgumentError as error:
        raise UnreadableError(str(error)) from None


def _readable(message: Any) -> Any:
    """Return the message; grpc.aio passes None for bytes it cannot parse."""
    if message is None:
        raise UnreadableError("bytes that are not a valid message")
    return message


async def _stream_error(call: Any) -> FlyspecError:
    return error_of_end(await call.code(), await call.details() or "")


def error_of_end(code: grpc.StatusCode, details: str) -> FlyspecError:
    """Return the error for a call's end; statuses not sent by flyspec mean a lost connection."""
    lost = code in (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN)
    if code is grpc.StatusCode.INTERNAL and not details.startswith(rpc.BUG):
        lost = True
    if lost:
        return UnavailableError(f"the stream ended: {code.name} {details}".rstrip())
    return rpc.error_of_status(code, details or code.name)
