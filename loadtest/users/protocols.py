"""The protocols by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from loadtest.connection import Endpoint
from loadtest.options import ProtocolName
from loadtest.transport import Transport
from loadtest.users.grpc import GrpcTransport
from loadtest.users.http import HttpTransport

TRANSPORTS: Mapping[ProtocolName, Callable[[Sequence[Endpoint], int | None], Transport]] = {
    "grpc": GrpcTransport,
    "http": HttpTransport,
}
"""To endpoints, by so many connections to each; None: as many as suits the protocol."""
