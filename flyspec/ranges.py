"""Ranges of numbers in requests, and the error message for a value out of range."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any

from flyspec.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Range:
    """From `low` to `high`, both included; `open` excludes `low`.

    Only integers if both ends are. `note` follows the ends in messages.
    """

    low: float
    high: float
    note: str = ""
    open: bool = False

    @property
    def integers(self) -> bool:
        """True if only integers are in range."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def __str__(self) -> str:
        """Format the range for docs and help."""
        return f"{'above ' if self.open else ''}{self.low:g} to {self.high:,g}{self.note}"

    def __contains__(self, value: Any) -> bool:
        kind: Any = int if self.integers else Real  # numpy's numbers too
        if isinstance(value, bool) or not isinstance(value, kind):
            return False
        return bool((self.low < value if self.open else self.low <= value) and value <= self.high)

    def check(self, field: str, value: object) -> None:
        """Raise `InvalidArgumentError` if a value is out of range, as NaN always is."""
        if value not in self:
            low, high = _shown(self.low), _shown(self.high)
            ends = f"between {low} and {high}"
            if self.open:
                ends = f"greater than {low} and at most {high}"
            kind = "an integer " if self.integers else ""
            raise InvalidArgumentError(
                f"{field} must be {kind}{ends}{self.note}, got {_shown(value)}"
            )


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
