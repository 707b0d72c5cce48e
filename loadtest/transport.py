"""What users need of a protocol. Each protocol has a module that implements it: `grpc`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from flyspec.client import Completion, GenerateOptions, Prompt, Started


class TokenStream(Protocol):
    """A running generation."""

    def __iter__(self) -> Iterator[Started | Sequence[int] | Completion]:
        """That it got its slot, the tokens of each message as they arrive, the completion.

        Raises `FlyspecError`: `ResourceExhaustedError` if the server has no room for it.
        """

    def cancel(self) -> None:
        """Give it up, from any greenlet; iterating then raises. Does nothing the second time."""


class Transport(Protocol):
    """Connections to the servers, shared by all users."""

    def open(
        self, prompt: Prompt, options: GenerateOptions, addresses: int | None = None
    ) -> TokenStream:
        """Ask for a generation, from one of the first `addresses`; returns at once.

        `options.timeout_s` limits all of it.
        """

    def close(self) -> None:
        """Cancel what is running and close the connections."""
