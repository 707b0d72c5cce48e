"""The gRPC API through synchronous stubs, which gevent makes cooperative."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import grpc

from flyspec import rpc, wire
from flyspec.client import GenerateOptions, Models, Prompt
from flyspec.errors import FlyspecError, UnavailableError
from flyspec.v1 import generation_pb2, generation_pb2_grpc
from flyspec.values.requests import GenerationRequest
from loadtest.connection import Endpoint
from loadtest.options import CHANNELS
from loadtest.transport import StreamEnd


class GrpcStream:
    """A streaming call."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __iter__(self) -> Iterator[Sequence[int] | StreamEnd]:
        try:
            for response in self._call:
                match response.WhichOneof("response"):
                    case "chunk":  # not decoded: the generator has to be fast
                        yield response.chunk.token_ids
                    case "completion":
                        ended = wire.unwrap(response)
                        rounds = ended.speculation.num_rounds
                        yield StreamEnd(ended.completion_tokens, rounds, ended.recoveries)
                        return
        except grpc.RpcError as error:
            raise rpc.error_of(error) from None
        raise UnavailableError("the server ended the stream without a completion")

    def cancel(self) -> None:
        self._call.cancel()


class GrpcTransport:
    """So many `connections` (channels) to each endpoint; endpoints and channels take turns."""

    def __init__(self, endpoints: Sequence[Endpoint], connections: int | None = None) -> None:
        self._endpoints = endpoints
        self._channels = [e.connect() for _ in range(connections or CHANNELS) for e in endpoints]
        self._stubs = [generation_pb2_grpc.GenerationServiceStub(c) for c in self._channels]
        self._turns = count()

    def open(self, prompt: Prompt, options: GenerateOptions) -> GrpcStream:
        request, turn = wire.encode(GenerationRequest(prompt, options)), next(self._turns)
        metadata = self._endpoints[turn % len(self._endpoints)].metadata
        stub: Any = self._stubs[turn % len(self._stubs)]
        return GrpcStream(stub.Generate(request, timeout=options.timeout_s, metadata=metadata))

    def list_models(self, timeout_s: float = 10.0) -> Models:
        request, endpoint = generation_pb2.ListModelsRequest(), self._endpoints[0]
        stub: Any = self._stubs[0]
        try:
            response = stub.ListModels(request, timeout=timeout_s, metadata=endpoint.metadata)
        except grpc.RpcError as error:
            found = rpc.error_of(error)
            raise FlyspecError(f"{endpoint.address} does not answer: {found}") from None
        return wire.decode(Models, response)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
