"""Patience with what has not paid of late: tried always for a while, then now and then."""

from __future__ import annotations

from dataclasses import dataclass

PATIENCE = 16
"""Tries in a row without success after which it is tried rarely."""
RARELY = 8
"""Then, every so manyth occasion is a try."""


@dataclass(slots=True)
class Patience:
    """Counts occasions since something last paid."""

    _occasions: int = 0

    def tries(self) -> bool:
        """Return whether to try it on this occasion."""
        self._occasions += 1
        return self._occasions <= PATIENCE or self._occasions % RARELY == 0

    def paid(self) -> None:
        self._occasions = 0
