"""Calls to the orchestrator's generation port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from flyspec import rpc, wire
from flyspec.client import messages
from flyspec.client.connection import Connection
from flyspec.client.transcript import Transcript
from flyspec.config import GENERATION_PORT
from flyspec.credentials import Credentials
from flyspec.errors import (
    DeadlineExceededError,
    FlyspecError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from flyspec.metadata import CLIENT_ID_KEY
from flyspec.v1 import generation_pb2, generation_pb2_grpc
from flyspec.values.generation import (
    Chunk,
    Completion,
    Event,
    GenerateOptions,
    Generation,
    GenerationRequest,
    Models,
    Prompt,
    Retract,
    RoundRecord,
    ScoredTokens,
    ScoreRequest,
    Started,
)

DEFAULT_ADDRESS = f"127.0.0.1:{GENERATION_PORT}"


class Client(Connection):
    """Generates text. `async with Client(address) as client: await client.complete("def f(")`."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        client_id: str = "",
        credentials: Credentials | None = None,
    ) -> None:
        """Without API keys, per-client limits apply to the `client_id` or else to the address.

        Raises `ConfigError` for bad `credentials`.
        """
        super().__init__(address, credentials)
        if client_id:
            self._metadata += ((CLIENT_ID_KEY, client_id),)

    async def generate(
        self, prompt: Prompt, options: GenerateOptions | None = None
    ) -> AsyncIterator[Event]:
        """Stream a generation: `Started`, any number of `Chunk`, `Completion`.

        With `eager`, a `Retract` may come between chunks; `Transcript` keeps the current text.

        Closing the iterator early (`contextlib.aclosing`) cancels the request.

        Raises `ResourceExhaustedError`, with a retry delay, if the server is full, and
        `DeadlineExceededError` after `timeout_s`.
        """
        options = options or GenerateOptions()
        timeout = options.timeout_s
        if timeout is not None and not timeout > 0:
            raise InvalidArgumentError(f"timeout_s must be more than 0, got {timeout:g}")
        stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        try:
            request = wire.encode(GenerationRequest(prompt, options))
        except (ValueError, TypeError) as error:  # such as protobuf's for -1 in an unsigned field
            reason = messages.misfit(prompt, options)
            raise InvalidArgumentError(reason or f"the request cannot be sent: {error}") from None
        metadata = (*self._metadata, *messages.metadata_of(options))
        call: Any = stub.Generate(request, timeout=timeout, metadata=metadata)
        try:
            async for response in call:
                yield event_of(response)
        except grpc.aio.AioRpcError as error:
            late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if late and timeout is not None and not rpc.was_said(error):
                raise DeadlineExceededError(
                    f"the generation did not end within {timeout:g} s; allow more time or lower "
                    "max_tokens"
                ) from None
            raise self._error_of(error) from None
        finally:
            call.cancel()

    async def score(
        self, prompt: Prompt, logprobs: int = 0, timeout_s: float | None = None
    ) -> AsyncIterator[ScoredTokens]:
        """Stream the tokens of a given text with the target's log-probabilities, in pieces.

        `logprobs` most likely tokens are reported at each position. Raises as `generate` does.
        """
        stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        request = wire.encode(ScoreRequest(prompt, logprobs))
        call: Any = stub.Score(request, timeout=timeout_s, metadata=self._metadata)
        try:
            async for response in call:
                yield wire.decode(ScoredTokens, response)
        except grpc.aio.AioRpcError as error:
            raise self._error_of(error) from None
        finally:
            call.cancel()

    async def complete(
        self, prompt: Prompt, options: GenerateOptions | None = None, patience_s: float = 0.0
    ) -> Generation:
        """Generate and return the whole result.

        If the server is full, retry when it says so, for up to `patience_s` seconds.
        """
        until = time.monotonic() + patience_s
        while True:
            try:
                return await self._complete(prompt, options)
            except ResourceExhaustedError as error:
                rest = error.retry_after_s
                if rest is None or time.monotonic() + rest > until:
                    raise
            await asyncio.sleep(rest)

    async def _complete(self, prompt: Prompt, options: GenerateOptions | None) -> Generation:
        started: Started | None = None
        transcript = Transcript()
        rounds: list[RoundRecord] = []
        async with aclosing(self.generate(prompt, options)) as events:  # type: ignore[type-var]
            async for event in events:
                match event:
                    case Started():
                        started = event
                    case Chunk() | Retract():
                        transcript.add(event)
                    case RoundRecord():
                        rounds.append(event)
                    case Completion() if started is not None:
                        return Generation(started, transcript.chunks, event, rounds)
        raise UnavailableError(f"{self.address} ended the stream without a completion")

    async def list_models(self, timeout_s: float = 10.0) -> Models:
        """List the server's models, drafters and rules."""
        stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        request = generation_pb2.ListModelsRequest()
        return wire.decode(Models, await self._call(stub.ListModels, request, timeout_s))


def event_of(response: generation_pb2.GenerateResponse) -> Event:
    """Return the event in a server's message. Raises `FlyspecError` for one of a newer version."""
    try:
        event: Event = wire.unwrap(response)
    except InvalidArgumentError as error:
        raise FlyspecError(f"the server sent a message unknown to this client: {error}") from None
    return event
