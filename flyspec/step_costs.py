"""Estimates the duration of a target step by its number of tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from flyspec.values.admin import MeasuredStep


class StepCosts:
    """Duration of a step by number of tokens: linear interpolation of startup measurements.

    Without measurements, all steps take equally long.
    """

    def __init__(self, measured: Sequence[MeasuredStep] = ()) -> None:
        self.measured = tuple(measured)
        self._sizes = [cost.num_tokens for cost in self.measured]

    def __call__(self, num_tokens: int) -> float:
        """Return the duration of a step with that many tokens, ns."""
        costs = self.measured
        if not costs:
            return 1.0
        at = bisect_left(self._sizes, num_tokens)
        if at == 0:
            return costs[0].duration_ns
        before, behind = costs[at - 1], costs[min(at, len(costs) - 1)]
        if before is behind:  # past the largest: extrapolate
            if len(costs) == 1:
                return before.duration_ns
            before = costs[-2]
        slope = (behind.duration_ns - before.duration_ns) / (behind.num_tokens - before.num_tokens)
        return before.duration_ns + slope * (num_tokens - before.num_tokens)
