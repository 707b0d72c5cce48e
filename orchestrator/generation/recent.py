"""Estimates from observations of which recent ones count most. Pure."""

from __future__ import annotations

MEMORY = 0.8
"""Factor by which an observation fades with each further one."""
SLOPE_MEMORY = 0.95
"""`MEMORY` for a slope, which takes more observations to tell."""
SLOPE_PRIOR = 4.0
"""Variance of the counts at which the slope and the mean per count have equal weight."""


class Recent:
    """A mean in which recent observations count most.

    `value` starts as `otherwise`, with the weight of `prior` observations.
    """

    __slots__ = ("_amount", "_count", "_memory", "value")

    def __init__(self, otherwise: float, memory: float = MEMORY, prior: float = 0.0) -> None:
        self.value, self._memory = otherwise, memory
        self._amount, self._count = otherwise * prior, prior

    @property
    def known(self) -> bool:
        """Whether there has been an observation, or there is a prior."""
        return self._count > 0

    def observe(self, amount: float, count: float = 1, weight: int = 1) -> None:
        """Add an observation: a total `amount` over `count`, fading older ones `weight` times."""
        fade = self._memory**weight
        self._amount = self._amount * fade + amount
        self._count = self._count * fade + count
        self.value = self._amount / self._count


class RecentSlope:
    """How much an amount grows with its count, by least squares; recent observations count most.

    While counts hardly differ, `value` is the mean per count. It is 0 before any observation.
    """

    def __init__(self) -> None:
        self._weight = self._count = self._amount = 0.0
        self._squares = self._products = 0.0
        self.value = 0.0

    @property
    def known(self) -> bool:
        """Whether there has been an observation."""
        return self._weight > 0

    def observe(self, amount: float, count: float) -> None:
        """Add an observation: `amount` for a positive `count`."""
        fade = SLOPE_MEMORY
        self._weight = self._weight * fade + 1.0
        self._count = self._count * fade + count
        self._amount = self._amount * fade + amount
        self._squares = self._squares * fade + count * count
        self._products = self._products * fade + count * amount
        count, amount = self._count / self._weight, self._amount / self._weight
        variance = max(0.0, self._squares / self._weight - count * count)
        covariance = self._products / self._weight - count * amount
        mean = amount / count
        slope = (covariance + SLOPE_PRIOR * mean) / (variance + SLOPE_PRIOR)
        self.value = min(mean, max(0.0, slope))
