"""How long who waits for a slot will wait, and when who was refused may come back."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

NEWEST_WEIGHT = 0.1
"""Weight of the newest in the moving average."""
UNKNOWN_RETRY_S = 1.0
"""When to come back while no slot was ever given back."""
MIN_RETRY_S, MAX_RETRY_S = 0.1, 60.0
RETRY_JITTER = 0.5
"""Up to this share is added to when to retry: who was refused together does not return together."""


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

    def held_s(self, began: float) -> float:
        """How long it is held, seconds."""
        return self._clock() - began

    def end(self, began: float) -> None:
        """It is given back."""
        held = self.held_s(began)
        self._held -= 1
        self._sum_of_starts = self._sum_of_starts - began if self._held else 0.0
        self._mean_s = self._mean_s + NEWEST_WEIGHT * (held - self._mean_s) if self.known else held

    def wait_s(self, place: int, slots: int) -> float:
        """About how long a request in that place of the queue for so many slots waits, seconds."""
        return max(0, place) * self.estimate_s / max(1, slots)

    def retry_after_s(self, wait_s: float, slots: int) -> float:
        """When somebody may come back who would wait so long for one of so many slots, seconds."""
        after = max(wait_s, self.estimate_s / max(1, slots))
        if not self.known:
            after = max(after, UNKNOWN_RETRY_S)
        after *= 1 + RETRY_JITTER * random.random()
        return min(max(after, MIN_RETRY_S), MAX_RETRY_S)
