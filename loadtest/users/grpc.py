"""The gRPC API, by synchronous stubs, which gevent makes cooperative."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import grpc

from flyspec import rpc, wire
from flyspec.client import Completion, GenerateOptions, Models, Prompt
from flyspec.errors import FlyspecError, UnavailableError
from flyspec.v1 import generation_pb2, generation_pb2_grpc
from flyspec.values.generation import GenerationRequest
from loadtest.connection import Endpoint


class GrpcStream:
    """A call that streams."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __iter__(self) -> Iterator[int | Completion]:
        try:
            for response in self._call:
                match response.WhichOneof("response"):
                    case "chunk":
                        yield len(response.chunk.token_ids)
                    case "completion":
                        completion = wire.unwrap(response)
                        assert isinstance(completion, Completion)
                        yield completion
                        return
        except grpc.RpcError as error:
            raise error_of(error) from None
        raise UnavailableError("the server ended the stream without a completion")

    def cancel(self) -> None:
        """Give it up."""
        self._call.cancel()


class GrpcTransport:
    """`connections` channels, used in turn; each is one TCP connection."""

    def __init__(self, endpoint: Endpoint, connections: int = 1) -> None:
        self._channels = [endpoint.connect() for _ in range(connections)]
        self._metadata, self._address = endpoint.metadata, endpoint.address
        self._stubs = cycle([generation_pb2_grpc.GenerationServiceStub(c) for c in self._channels])

    def open(self, prompt: Prompt, options: GenerateOptions) -> GrpcStream:
        """Ask for a generation."""
        request = wire.encode(GenerationRequest(prompt, options))
        stub = next(self._stubs)
        call = stub.Generate(request, timeout=options.timeout_s, metadata=self._metadata)
        return GrpcStream(call)

    def list_models(self, timeout_s: float = 10.0) -> Models:
        """What answers there. Raises `FlyspecError` that names the address if nothing does."""
        request = generation_pb2.ListModelsRequest()
        try:
            stub = next(self._stubs)
            response = stub.ListModels(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            found = error_of(error)
            raise FlyspecError(f"{self._address} does not answer: {found}") from None
        return wire.decode(Models, response)

    def close(self) -> None:
        """Close the connections."""
        for channel in self._channels:
            channel.close()


def error_of(error: Any) -> FlyspecError:
    """The error that a failed call of a synchronous stub stands for."""
    return rpc.error_of(error)
