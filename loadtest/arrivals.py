"""When requests come, if they come by themselves. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator


def poisson(rate: float, seconds: float, rng: random.Random) -> Iterator[float]:
    """Times of arrival in [0, seconds), ascending: `rate` a second on average, independently."""
    if rate <= 0:
        return
    now = rng.expovariate(rate)
    while now < seconds:
        yield now
        now += rng.expovariate(rate)
