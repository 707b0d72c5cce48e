"""Statuses become errors again; what grpc.aio says of its own is not taken for a peer's word."""

from __future__ import annotations

import grpc
import pytest

from flyspec import rpc
from flyspec.errors import FlyspecError, InvalidArgumentError, UnavailableError

Code = grpc.StatusCode


@pytest.mark.parametrize(
    ("code", "details", "kind", "message"),
    [
        (Code.INVALID_ARGUMENT, "seed: no", InvalidArgumentError, "seed: no"),
        (Code.UNAVAILABLE, "gone", UnavailableError, "gone"),
        # A write that met a stream which had just ended: another try may mend it.
        (Code.INTERNAL, "Internal error from Core", UnavailableError, "the stream ended"),
        # A bug of the peer: another try will not.
        (Code.INTERNAL, "internal error in Verify", FlyspecError, "INTERNAL: internal error in"),
        (Code.DATA_LOSS, "x", FlyspecError, "DATA_LOSS: x"),
    ],
)
def test_statuses_become_errors(code, details, kind, message):
    error = rpc.error_of_status(code, details)
    assert type(error) is kind
    assert message in str(error)
