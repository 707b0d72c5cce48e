"""Recent evidence: shares of cases, and patience with what has not paid. Pure."""

from __future__ import annotations

from dataclasses import dataclass

PATIENCE = 16
"""Tries in a row without success after which it is tried rarely."""
RARELY = 8
"""Then, one occasion in so many is a try."""


@dataclass(slots=True)
class Share:
    """A share of cases: `seen` cases, `held` of them true, recent ones counting most."""

    seen: float = 0.0
    held: float = 0.0

    def observe(self, held: float, memory: float, seen: float = 1.0) -> None:
        """Add `seen` cases; earlier ones fade by `memory` with each of them."""
        self.fade(memory**seen)
        self.seen, self.held = self.seen + seen, self.held + held

    def fade(self, factor: float) -> None:
        self.seen, self.held = self.seen * factor, self.held * factor

    def value(self, prior: float, weight: float) -> float:
        """Return the share, expected to be `prior` with the weight of so many cases."""
        return (self.held + weight * prior) / (self.seen + weight)


@dataclass(slots=True)
class Patience:
    """Occasions since something last paid: it is tried always for a while, then now and then."""

    _occasions: int = 0

    def tries(self) -> bool:
        """Return whether to try it on this occasion."""
        self._occasions += 1
        return self._occasions <= PATIENCE or self._occasions % RARELY == 0

    def paid(self) -> None:
        self._occasions = 0
