"""The gRPC API through synchronous stubs, which gevent makes cooperative."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import grpc

from flyspec import rpc, wire
from flyspec.client import GenerateOptions, Models, Prompt
from flyspec.errors import FlyspecError, UnavailableError
from flyspec.v1 import generation_pb2, generation_pb2_grpc
from flyspec.values.admin import ModelInfo
from flyspec.values.requests import GenerationRequest
from loadtest.load import StreamEnd, TokenStream
from loadtest.options import Endpoint

CHANNELS = 4
"""Connections to each address, which requests share."""
ANSWER_S = 10.0


class GrpcTransport:
    """Several channels to each endpoint, which take turns."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._first = endpoints[0].address
        self._metadata = [e.credentials.metadata() for e in endpoints] * CHANNELS
        self._channels = [e.connect() for _ in range(CHANNELS) for e in endpoints]
        self._stubs = [generation_pb2_grpc.GenerationServiceStub(c) for c in self._channels]
        self._turns = cycle(range(len(self._stubs)))

    def stream(self, prompt: Prompt, options: GenerateOptions) -> TokenStream:
        request, turn = wire.encode(GenerationRequest(prompt, options)), next(self._turns)
        stub: Any = self._stubs[turn]
        call = stub.Generate(request, timeout=options.timeout_s, metadata=self._metadata[turn])
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
        raise UnavailableError("the server ended the stream without a completion")

    def target(self) -> ModelInfo:
        request, stub = generation_pb2.ListModelsRequest(), self._stubs[0]
        try:
            response = stub.ListModels(request, timeout=ANSWER_S, metadata=self._metadata[0])
        except grpc.RpcError as error:
            found = rpc.error_of(error)
            raise FlyspecError(f"{self._first} does not answer: {found}") from None
        return wire.decode(Models, response).target

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
