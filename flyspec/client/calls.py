"""Calls to the orchestrator, and errors that say what to change."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing
from typing import Any, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flyspec import rpc, wire
from flyspec.client import messages
from flyspec.client.transcript import Transcript
from flyspec.client.values import (
    Chunk,
    Completion,
    DrafterStatus,
    Event,
    GenerateOptions,
    Generation,
    Models,
    Prompt,
    Retract,
    Started,
    Status,
)
from flyspec.config import ADMIN_PORT, GENERATION_PORT
from flyspec.errors import FlyspecError, InvalidArgumentError, UnavailableError
from flyspec.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc

DEFAULT_ADDRESS = f"127.0.0.1:{GENERATION_PORT}"
DEFAULT_ADMIN_ADDRESS = f"127.0.0.1:{ADMIN_PORT}"

# What gRPC says when there is no such port or no such host.
_NOT_REACHED = ("failed to connect", "errors resolving", "resolution failed")

T = TypeVar("T")


class _Connection:
    """A channel to one address, opened on first use; errors name the address."""

    flag = "--address"

    def __init__(self, address: str) -> None:
        self.address = address
        self._opened: grpc.aio.Channel | None = None

    @property
    def _channel(self) -> grpc.aio.Channel:
        if self._opened is None:
            self._opened = rpc.connect(self.address)
        return self._opened

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what is running and close the connection."""
        if self._opened is not None:
            await self._opened.close()
            self._opened = None

    async def check_health(self, service: str = "", timeout_s: float = 5.0) -> str:
        """The `grpc.health.v1` status of a service, of the whole server by default: SERVING, ..."""
        stub = health_pb2_grpc.HealthStub(self._channel)
        request = health_pb2.HealthCheckRequest(service=service)
        response: Any = await self._call(stub.Check(request, timeout=timeout_s))
        name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
        return name

    async def _call(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise self._error_of(error) from None

    def _error_of(self, error: grpc.aio.AioRpcError) -> FlyspecError:
        """The server's own error, or that there is none: gRPC uses UNAVAILABLE for both."""
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return UnavailableError(f"{self.address} did not answer in time")
        if error.code() is not grpc.StatusCode.UNAVAILABLE or rpc.was_said(error):
            return rpc.error_of(error)
        details = error.details() or ""
        if any(what in details for what in _NOT_REACHED):
            return UnavailableError(
                f"no server at {self.address}; start one with `flyspec serve` or pass {self.flag}"
            )
        return UnavailableError(f"lost the server at {self.address}: {details}")


class Client(_Connection):
    """Generates text. `async with Client(address) as client: await client.complete("def f(")`."""

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        super().__init__(address)

    async def generate(
        self, prompt: Prompt, options: GenerateOptions | None = None
    ) -> AsyncIterator[Event]:
        """Stream a generation: `Started`, any number of `Chunk`, `Completion`.

        With `eager`, `Retract` may come between chunks; a `Transcript` keeps track of what stands.

        Closing the iterator early (`contextlib.aclosing`) cancels the request.
        """
        stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        try:
            request = messages.request_to_proto(prompt, options or GenerateOptions())
        except (ValueError, TypeError) as error:  # what protobuf says of -1 in an unsigned field
            reason = messages.misfit(prompt, options or GenerateOptions())
            raise InvalidArgumentError(
                reason or f"the request cannot be written: {error}"
            ) from None
        call: Any = stub.Generate(request)
        try:
            async for response in call:
                yield messages.event_from_proto(response)
        except grpc.aio.AioRpcError as error:
            raise self._error_of(error) from None
        finally:
            call.cancel()

    async def complete(self, prompt: Prompt, options: GenerateOptions | None = None) -> Generation:
        """Generate, and return everything at its end."""
        started: Started | None = None
        transcript = Transcript()
        async with aclosing(self.generate(prompt, options)) as events:  # type: ignore[type-var]
            async for event in events:
                match event:
                    case Started():
                        started = event
                    case Chunk() | Retract():
                        transcript.add(event)
                    case Completion() if started is not None:
                        return Generation(started, transcript.chunks, event)
        raise UnavailableError(f"{self.address} ended the stream without a completion")

    async def list_models(self, timeout_s: float = 10.0) -> Models:
        """The models that answer here."""
        stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        request = generation_pb2.ListModelsRequest()
        response: Any = await self._call(stub.ListModels(request, timeout=timeout_s))
        return Models(
            target=wire.model_info_from_proto(response.target),
            drafters=tuple(response.drafters),
            rules=tuple(response.rules),
        )


class AdminClient(_Connection):
    """Asks the orchestrator how things stand, on its admin port."""

    flag = "--admin-address"

    def __init__(self, address: str = DEFAULT_ADMIN_ADDRESS) -> None:
        super().__init__(address)

    async def status(self, timeout_s: float = 10.0) -> Status:
        """State of the orchestrator and of the services behind it."""
        stub = admin_pb2_grpc.AdminServiceStub(self._channel)
        response: Any = await self._call(
            stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=timeout_s)
        )
        return Status(
            ready=response.ready,
            active_generations=response.active_generations,
            waiting_generations=response.waiting_generations,
            verify=messages.upstream_from_proto(response.verify),
            draft=messages.upstream_from_proto(response.draft),
        )

    async def list_drafters(self, timeout_s: float = 10.0) -> list[DrafterStatus]:
        """The drafters that requests can name."""
        stub = admin_pb2_grpc.AdminServiceStub(self._channel)
        response: Any = await self._call(
            stub.ListDrafters(admin_pb2.ListDraftersRequest(), timeout=timeout_s)
        )
        return [
            DrafterStatus(
                name=d.name,
                kind=d.kind,
                active=d.active,
                address=d.address,
                usable=d.usable,
                reason=d.reason,
                model=wire.model_info_from_proto(d.model) if d.HasField("model") else None,
            )
            for d in response.drafters
        ]
