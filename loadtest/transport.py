"""The interface of a protocol. Each protocol has a module that implements it in `users`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from flyspec.client import GenerateOptions, Models, Prompt, Recovery


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """The generation is complete: its output tokens, its rounds, and what it recovered from."""

    tokens: int
    rounds: int
    recoveries: Sequence[Recovery]


class TokenStream(Protocol):
    """A running generation."""

    def __iter__(self) -> Iterator[Sequence[int] | StreamEnd]:
        """The tokens of each message as they arrive, then its end.

        Raises `FlyspecError`: `ResourceExhaustedError` if the server has no room for it.
        """

    def cancel(self) -> None:
        """Give it up, from any greenlet; iterating then raises. Does nothing the second time."""


class Transport(Protocol):
    """Connections to the servers, shared by all users."""

    def open(self, prompt: Prompt, options: GenerateOptions) -> TokenStream:
        """Ask for a generation, from each of the addresses in turn; returns at once.

        `options.timeout_s` limits all of it. Raises `ConfigError` for options that the protocol
        cannot carry.
        """

    def list_models(self, timeout_s: float = 10.0) -> Models:
        """The models at the first address; empty or 0 is what the protocol does not say.

        Raises `FlyspecError` with the address if it does not answer.
        """

    def close(self) -> None:
        """Cancel what is running and close the connections."""
