"""The client for programs without an event loop, scripts and notebooks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Self, Unpack

import grpc

from flyspec import rpc, wire
from flyspec.client.generation import Gathering, GenerationConnection, event_of
from flyspec.client.requests import (
    AnyPrompt,
    GenerateKeywords,
    Retries,
    encoded,
    options_of,
    prompt_of,
)
from flyspec.errors import FlyspecError
from flyspec.v1 import generation_pb2, generation_pb2_grpc
from flyspec.values.generation import (
    Event,
    GenerateOptions,
    Generation,
    Models,
    ScoredTokens,
    ScoreRequest,
)


class Client(GenerationConnection):
    """Generates text, as `AsyncClient` does: `Client().complete("def f(", rule="exact").text`.

    May be used by several threads. Methods raise `FlyspecError`.
    """

    _opened: grpc.Channel | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel running calls and close the connection; a later call opens a new one."""
        channel, self._opened = self._opened, None
        if channel is not None:
            channel.close()

    def generate(
        self,
        prompt: AnyPrompt,
        options: GenerateOptions | None = None,
        **keywords: Unpack[GenerateKeywords],
    ) -> Iterator[Event]:
        """Stream a generation: `Started`, any number of `Chunk`, `Completion`.

        A prompt is a text, token ids or the messages of a chat. Leaving the loop early cancels the
        request.
        """
        given = options_of(options, keywords)
        message, metadata = encoded(prompt_of(prompt), given)
        call = self._stub.Generate(
            message, timeout=given.timeout_s, metadata=(*self._metadata, *metadata)
        )
        try:
            for response in call:
                yield event_of(response)
        except grpc.RpcError as error:
            raise self._error_of(error, given.timeout_s) from None
        finally:
            call.cancel()

    def complete(
        self,
        prompt: AnyPrompt,
        options: GenerateOptions | None = None,
        patience_s: float = 0.0,
        **keywords: Unpack[GenerateKeywords],
    ) -> Generation:
        """Generate and return the whole result.

        If the server is full or cannot be reached, retry up to `max_retries` times; if it is full
        and says when it will not be, for up to `patience_s` seconds.
        """
        given, retries = options_of(options, keywords), Retries(self._max_retries, patience_s)
        while True:
            gathering = Gathering()
            try:
                for event in self.generate(prompt, given):
                    gathering.add(event)
                return gathering.whole(self.address)
            except FlyspecError as error:
                rest_s = retries.rest_s(error)
            time.sleep(rest_s)

    def score(self, prompt: AnyPrompt, logprobs: int = 0) -> Iterator[ScoredTokens]:
        """Stream the tokens of a given text with the target's log-probabilities, in pieces."""
        request = wire.encode(ScoreRequest(prompt_of(prompt), logprobs))
        call = self._stub.Score(request, metadata=self._metadata)
        try:
            for response in call:
                yield wire.decode(ScoredTokens, response)
        except grpc.RpcError as error:
            raise self._error_of(error) from None
        finally:
            call.cancel()

    def list_models(self, timeout_s: float = 10.0) -> Models:
        """List the server's models, drafters and rules."""
        request = generation_pb2.ListModelsRequest()
        try:
            response = self._stub.ListModels(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._error_of(error) from None
        return wire.decode(Models, response)

    @property
    def _stub(self) -> Any:
        if self._opened is None:
            self._opened = rpc.connect_blocking(self.address, self._security)
        return generation_pb2_grpc.GenerationServiceStub(self._opened)
