"""How sure a figure is: intervals by resampling what it was taken from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

RESAMPLES = 2000


def interval(
    values: Sequence[float],
    statistic: Callable[..., Any] = np.median,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> tuple[float, float]:
    """The 95 % interval of a statistic of values, by seeded bootstrap resamples of them."""
    rng = np.random.default_rng(seed)
    drawn = np.asarray(values)[rng.integers(len(values), size=(resamples, len(values)))]
    low, high = np.percentile(statistic(drawn, axis=1), (2.5, 97.5))
    return float(low), float(high)
