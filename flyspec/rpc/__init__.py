"""What every gRPC server and channel of flyspec has in common: limits, errors, health, drain.

A service builds its servicer and puts it into a `GrpcServer`; a servicer's methods are decorated
with `handler`, which turns `FlyspecError` into its gRPC status.
"""

from flyspec.rpc.channel import CHANNEL_OPTIONS, connect
from flyspec.rpc.gate import Check, Gate, checks_of, names_of
from flyspec.rpc.link import Link
from flyspec.rpc.server import SERVER_OPTIONS, GrpcServer
from flyspec.rpc.sizes import (
    BASE_REQUEST_BYTES,
    MAX_ID_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_STREAMS,
    max_request_bytes,
    max_streams,
)
from flyspec.rpc.statuses import (
    ABORT_TIMEOUT_S,
    BUG,
    MAX_DETAILS_CHARACTERS,
    MAX_RICH_DETAILS_CHARACTERS,
    SAID,
    SERVER_STOPPED,
    WRITE_FAILED,
    abort,
    error_of,
    error_of_status,
    handler,
    status_of,
    was_said,
)
from flyspec.rpc.streams import read, unbroken, write

__all__ = [
    "ABORT_TIMEOUT_S",
    "BASE_REQUEST_BYTES",
    "BUG",
    "CHANNEL_OPTIONS",
    "MAX_DETAILS_CHARACTERS",
    "MAX_ID_BYTES",
    "MAX_MESSAGE_BYTES",
    "MAX_RICH_DETAILS_CHARACTERS",
    "MAX_STREAMS",
    "SAID",
    "SERVER_OPTIONS",
    "SERVER_STOPPED",
    "WRITE_FAILED",
    "Check",
    "Gate",
    "GrpcServer",
    "Link",
    "abort",
    "checks_of",
    "connect",
    "error_of",
    "error_of_status",
    "handler",
    "max_request_bytes",
    "max_streams",
    "names_of",
    "read",
    "status_of",
    "unbroken",
    "was_said",
    "write",
]
