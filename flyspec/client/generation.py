"""Calls to the orchestrator's generation port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Unpack

import grpc

from flyspec import wire
from flyspec.client.connection import AsyncConnection, Connection
from flyspec.client.messages import message_of, metadata_of, time_limit
from flyspec.client.requests import (
    AnyPrompt,
    GenerateKeywords,
    Retries,
    options_of,
    prompt_of,
    shown,
)
from flyspec.client.transcript import Transcript
from flyspec.config import GENERATION_PORT
from flyspec.credentials import Credentials
from flyspec.errors import ConfigError, FlyspecError, InvalidArgumentError, UnavailableError
from flyspec.metadata import CLIENT_ID_KEY
from flyspec.v1 import generation_pb2, generation_pb2_grpc
from flyspec.values.generation import Event, Generation, Models, ScoredTokens
from flyspec.values.requests import GenerateOptions, GenerationRequest, ScoreRequest

MAX_RETRIES = 2
DEFAULT_ADDRESS = f"127.0.0.1:{GENERATION_PORT}"


class GenerationConnection(Connection):
    """A connection to the generation port."""

    _kind, _default_port = "generation", GENERATION_PORT

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        client_id: str = "",
        credentials: Credentials | None = None,
        max_retries: int = MAX_RETRIES,
    ) -> None:
        """Without API keys, per-client limits apply to the `client_id` or else to the address.

        Without `credentials`, those in the environment are used. Raises `ConfigError`.
        """
        super().__init__(address, credentials)
        if not (isinstance(client_id, str) and client_id.isascii() and client_id.isprintable()):
            raise ConfigError(f"client_id: must be printable ASCII, got {shown(client_id)}")
        if not isinstance(max_retries, int) or max_retries < 0:
            raise ConfigError(f"max_retries: must be an integer >= 0, got {shown(max_retries)}")
        if client_id:
            self._metadata += ((CLIENT_ID_KEY, client_id),)
        self._max_retries = max_retries

    def _generation(self, prompt: AnyPrompt, options: GenerateOptions) -> dict[str, Any]:
        """Return the arguments of a call. Raises `InvalidArgumentError`."""
        return {
            "request": message_of(GenerationRequest(prompt_of(prompt), options)),
            "timeout": time_limit(options.timeout_s),
            "metadata": (*self._metadata, *metadata_of(options)),
        }

    def _scoring(self, prompt: AnyPrompt, logprobs: int, timeout_s: float | None) -> dict[str, Any]:
        """Return the arguments of a call. Raises `InvalidArgumentError`."""
        return {
            "request": message_of(ScoreRequest(prompt_of(prompt), logprobs)),
            "timeout": time_limit(timeout_s),
            "metadata": self._metadata,
        }

    def _whole(self, transcript: Transcript) -> Generation:
        """Return a generation. Raises `UnavailableError` if its end is missing."""
        if (generation := transcript.generation) is None:
            raise UnavailableError(f"{self.address} ended the stream without a completion")
        return generation

    @contextmanager
    def _ending(self, call: Any, timeout_s: float | None) -> Iterator[None]:
        """Read a stream in the block, then cancel what is left of it. Raises `FlyspecError`."""
        try:
            yield
        except grpc.RpcError as error:
            raise self._error_of(error, timeout_s) from None
        finally:
            call.cancel()


class AsyncClient(GenerationConnection, AsyncConnection):
    """Generates text: `async with AsyncClient() as client: await client.complete("def f(")`.

    May be used in several event loops. Methods raise `FlyspecError`.
    """

    async def generate(
        self,
        prompt: AnyPrompt,
        options: GenerateOptions | None = None,
        **keywords: Unpack[GenerateKeywords],
    ) -> AsyncIterator[Event]:
        """Stream a generation: `Started`, any number of `Chunk`, `Completion`.

        A prompt is a text, token ids or the messages of a chat; keywords are fields of
        `GenerateOptions` or `SamplingParams`. With `eager`, a `Retract` may come between chunks;
        `Transcript` keeps the current text.

        Closing the iterator early (`contextlib.aclosing`) cancels the request.

        Raises `InvalidArgumentError` that names the option, `ResourceExhaustedError`, with a retry
        delay, if the server is full, and `DeadlineExceededError` after `timeout_s` seconds.
        """
        given = options_of(options, keywords)
        call: Any = self._stub.Generate(**self._generation(prompt, given))
        with self._ending(call, given.timeout_s):
            async for response in call:
                yield event_of(response)

    async def score(
        self, prompt: AnyPrompt, logprobs: int = 0, timeout_s: float | None = None
    ) -> AsyncIterator[ScoredTokens]:
        """Stream the tokens of a given text with the target's log-probabilities, in pieces.

        `logprobs` most likely tokens are reported at each position. `timeout_s` is the time limit
        in seconds; None: no limit. Raises as `generate` does.
        """
        call: Any = self._stub.Score(**self._scoring(prompt, logprobs, timeout_s))
        with self._ending(call, timeout_s):
            async for response in call:
                yield wire.decode(ScoredTokens, response)

    async def complete(
        self,
        prompt: AnyPrompt,
        options: GenerateOptions | None = None,
        patience_s: float = 0.0,
        **keywords: Unpack[GenerateKeywords],
    ) -> Generation:
        """Generate and return the whole result.

        If the server is full or cannot be reached, retry up to `max_retries` times; if it is full
        and says when it will not be, for up to `patience_s` seconds. Raises as `generate` does.
        """
        given, retries = options_of(options, keywords), Retries(self._max_retries, patience_s)
        while True:
            transcript = Transcript()
            try:
                async with aclosing(self.generate(prompt, given)) as events:  # type: ignore[type-var]
                    async for event in events:
                        transcript.add(event)
                return self._whole(transcript)
            except FlyspecError as error:
                rest_s = retries.rest_s(error)
            await asyncio.sleep(rest_s)

    async def list_models(self, timeout_s: float = 10.0) -> Models:
        """List the server's models, drafters and rules."""
        request = generation_pb2.ListModelsRequest()
        return wire.decode(Models, await self._call(self._stub.ListModels, request, timeout_s))

    @property
    def _stub(self) -> Any:
        return generation_pb2_grpc.GenerationServiceStub(self._channel)


def event_of(response: generation_pb2.GenerateResponse) -> Event:
    """Return the event in a server's message. Raises `FlyspecError` for one of a newer version."""
    try:
        event: Event = wire.unwrap(response)
    except InvalidArgumentError as error:
        raise FlyspecError(f"the server sent a message unknown to this client: {error}") from None
    return event
