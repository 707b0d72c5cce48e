"""The client for programs without an event loop, scripts and notebooks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Self, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flyspec import rpc, wire
from flyspec.client.connection import health_of
from flyspec.client.generation import GenerationConnection, event_of
from flyspec.client.messages import time_limit
from flyspec.client.requests import AnyPrompt, GenerateKeywords, Retries, options_of
from flyspec.client.transcript import Transcript
from flyspec.errors import FlyspecError
from flyspec.v1 import generation_pb2, generation_pb2_grpc
from flyspec.values.generation import Event, Generation, Models, ScoredTokens
from flyspec.values.requests import GenerateOptions


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

        Raises `InvalidArgumentError` that names the option, `ResourceExhaustedError`, with a retry
        delay, if the server is full, and `DeadlineExceededError` after `timeout_s` seconds.
        """
        given = options_of(options, keywords)
        call = self._stub.Generate(**self._generation(prompt, given))
        with self._ending(call, given.timeout_s):
            for response in call:
                yield event_of(response)

    def complete(
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
                for event in self.generate(prompt, given):
                    transcript.add(event)
                return self._whole(transcript)
            except FlyspecError as error:
                rest_s = retries.rest_s(error)
            time.sleep(rest_s)

    def score(
        self, prompt: AnyPrompt, logprobs: int = 0, timeout_s: float | None = None
    ) -> Iterator[ScoredTokens]:
        """Stream the tokens of a given text with the target's log-probabilities, in pieces.

        `logprobs` most likely tokens are reported at each position. `timeout_s` is the time limit
        in seconds; None: no limit. Raises as `generate` does.
        """
        call = self._stub.Score(**self._scoring(prompt, logprobs, timeout_s))
        with self._ending(call, timeout_s):
            for response in call:
                yield wire.decode(ScoredTokens, response)

    def list_models(self, timeout_s: float = 10.0) -> Models:
        """List the server's models, drafters and rules."""
        request = generation_pb2.ListModelsRequest()
        return wire.decode(Models, self._call(self._stub.ListModels, request, timeout_s))

    def check_health(self, service: str = "", timeout_s: float = 5.0) -> str:
        """Return the `grpc.health.v1` status, such as SERVING, of a service or of the server."""
        request = health_pb2.HealthCheckRequest(service=service)
        stub = health_pb2_grpc.HealthStub(self._channel)
        return health_of(self._call(stub.Check, request, timeout_s))

    def _call(self, method: Any, request: Any, timeout_s: float) -> Any:
        """Call a unary method. Raises `FlyspecError`."""
        limit_s = time_limit(timeout_s)
        try:
            return method(request, timeout=limit_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._error_of(error) from None

    @property
    def _channel(self) -> grpc.Channel:
        if self._opened is None:
            self._opened = rpc.connect_blocking(self.address, self._security)
        return self._opened

    @property
    def _stub(self) -> Any:
        return generation_pb2_grpc.GenerationServiceStub(self._channel)
