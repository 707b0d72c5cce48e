"""What users need of a protocol. A module a protocol implements it: `grpc`, later HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from flyspec.client import Completion, GenerateOptions, Prompt


class TokenStream(Protocol):
    """A generation that is under way."""

    def __iter__(self) -> Iterator[int | Completion]:
        """The number of tokens in each message as it comes, then the completion.

        Raises `FlyspecError`: `ResourceExhaustedError` if the server has no room for it.
        """

    def cancel(self) -> None:
        """Give it up, from any greenlet; whoever iterates gets an error. Again does nothing."""


class Transport(Protocol):
    """A way to the server, shared by all users."""

    def open(self, prompt: Prompt, options: GenerateOptions) -> TokenStream:
        """Ask for a generation; `options.timeout_s` bounds all of it. Does not wait."""

    def close(self) -> None:
        """Cancel what is running and close the connections."""
