"""Estimates queueing times, and when refused requests should retry."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

NEWEST_WEIGHT = 0.1
"""Weight of the newest value in the moving average."""
UNKNOWN_RETRY_S = 1.0
"""Seconds before a retry, as long as no slot has ever been released."""
MIN_RETRY_S, MAX_RETRY_S = 0.1, 60.0
RETRY_JITTER = 0.5
"""Maximum share added to retry times, to spread out requests that were refused together."""


class HoldTimes:
    """Tracks how long slots are held: a moving average, and the age of those held now."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held = 0
        self._sum_of_starts = 0.0
        self._mean_s = 0.0

    @property
    def known(self) -> bool:
        return self._mean_s > 0

    @property
    def estimate_s(self) -> float:
        """Seconds a slot is held: the recent average, or the mean age of held slots if longer.

        Without the latter, a hanging target would go unnoticed, since nothing finishes.
        """
        age = self._clock() - self._sum_of_starts / self._held if self._held else 0.0
        return max(self._mean_s, age)

    def begin(self) -> float:
        """Record that a slot was taken, and return the time to pass to `end`."""
        now = self._clock()
        self._held += 1
        self._sum_of_starts += now
        return now

    def held_s(self, began: float) -> float:
        return self._clock() - began

    def end(self, began: float) -> None:
        held = self.held_s(began)
        self._held -= 1
        self._sum_of_starts = self._sum_of_starts - began if self._held else 0.0
        self._mean_s = self._mean_s + NEWEST_WEIGHT * (held - self._mean_s) if self.known else held

    def wait_s(self, place: int, slots: int) -> float:
        """Estimate the wait, in seconds, at `place` in the queue for `slots` slots."""
        return max(0, place) * self.estimate_s / max(1, slots)

    def retry_after_s(self, wait_s: float, slots: int) -> float:
        """Return the seconds before a retry, given the estimated wait for one of `slots` slots."""
        after = max(wait_s, self.estimate_s / max(1, slots))
        if not self.known:
            after = max(after, UNKNOWN_RETRY_S)
        after *= 1 + RETRY_JITTER * random.random()
        return min(max(after, MIN_RETRY_S), MAX_RETRY_S)
