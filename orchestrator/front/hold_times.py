"""How long slots are held, of late: what estimated waits rest on."""

from __future__ import annotations

import time
from collections.abc import Callable

NEWEST_WEIGHT = 0.1
"""Weight of the newest in the moving average."""


class HoldTimes:
    """A moving average over slots given back, and the age of those still held, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held = 0
        self._sum_of_starts = 0.0
        self._mean_s = 0.0

    @property
    def known(self) -> bool:
        """Whether a slot was ever given back."""
        return self._mean_s > 0

    @property
    def estimate_s(self) -> float:
        """How long a slot is held: as of late, or longer if those that are held now say so.

        Without the second, a target that hangs would go unnoticed as long as nothing ends.
        """
        age = self._clock() - self._sum_of_starts / self._held if self._held else 0.0
        return max(self._mean_s, age)

    def begin(self) -> float:
        """A slot is taken; the time, to be given to `end`."""
        now = self._clock()
        self._held += 1
        self._sum_of_starts += now
        return now

    def end(self, began: float) -> None:
        """It is given back."""
        held = self._clock() - began
        self._held -= 1
        self._sum_of_starts = self._sum_of_starts - began if self._held else 0.0
        self._mean_s = self._mean_s + NEWEST_WEIGHT * (held - self._mean_s) if self.known else held
