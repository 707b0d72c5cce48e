"""flyspec: speculative decoding as a service. Shared library, client and command line."""

import os
from typing import TYPE_CHECKING, Any

from flyspec.version import __version__ as __version__

if TYPE_CHECKING:
    from flyspec.client import AsyncClient as AsyncClient
    from flyspec.client import Chunk as Chunk
    from flyspec.client import Client as Client
    from flyspec.client import Completion as Completion

# gRPC's core writes its own lines to standard error (a port in use, a lost peer); we say it better.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")


_OF_CLIENTS = ("AsyncClient", "Chunk", "Client", "Completion")


def __dir__() -> list[str]:
    return ["__version__", *_OF_CLIENTS]


def __getattr__(name: str) -> Any:
    """Return a client, or a class of its results, which are imported only when asked for."""
    if name in _OF_CLIENTS:
        from flyspec import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
