"""flyspec: speculative decoding as a service. Shared library, client and command line."""

import os
from typing import TYPE_CHECKING, Any

from flyspec.version import __version__ as __version__

if TYPE_CHECKING:
    from flyspec.client import AsyncClient as AsyncClient
    from flyspec.client import Client as Client

# gRPC's core writes its own lines to standard error (a port in use, a lost peer); we say it better.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def __getattr__(name: str) -> Any:
    """Return `Client` or `AsyncClient`, which are imported only when they are asked for."""
    if name in ("AsyncClient", "Client"):
        from flyspec import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
