"""Times of plain tokens and of rounds of K drafts, by the number of running generations. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from flyspec.speculation_length import REQUESTED_BY_AUTO
from flyspec.step_costs import StepCosts
from flyspec.values.admin import MeasuredStep

MEMORY = 0.98
"""Factor by which a measured time fades with each further one: about 50 of them count."""
OUTLIER = 3.0
"""Standard deviations beyond which a measured time is cut off."""


class TimeLine:
    """Time as a line over a count: `intercept + slope * count`, ns, by Bayesian linear regression.

    The expected line counts as two observations, of none and `REQUESTED_BY_AUTO`, wrong by `error`.
    """

    def __init__(self, intercept: float, slope: float, error: float) -> None:
        self.intercept, self.slope = intercept, slope
        far = float(REQUESTED_BY_AUTO)
        end = intercept + slope * far
        self._expected = 2.0, far, far * far, intercept + end, far * end
        self._seen = [0.0] * 5  # weight; sums of counts, their squares, times, and products
        self._error, self._weight, self._squares = error * error, 1.0, error * error
        self._solve()

    def observe(self, count: float, duration: float, times: int = 1) -> None:
        """Learn a duration, or the mean of so many durations."""
        expected = self.intercept + self.slope * count
        limit = OUTLIER * math.sqrt(self._squares / self._weight / times)
        duration = min(max(duration, expected - limit), expected + limit)
        now, fade = (1.0, count, count * count, duration, count * duration), MEMORY**times
        self._seen = [fade * old + times * new for old, new in zip(self._seen, now, strict=True)]
        self._weight = fade * self._weight + times
        self._squares = fade * self._squares + times * times * (duration - expected) ** 2
        self._is_solved = False

    def fade(self) -> None:
        """Let the observations count less, as after another one, but not less than expectation."""
        if self._seen[0] > self._expected[0]:
            self._seen = [MEMORY * old for old in self._seen]
            self._is_solved = False

    def _solve(self) -> None:
        self._is_solved = True
        noise = max(1.0, self._squares / self._weight)
        error = max(noise, self._error)
        sums = (b / error + s / noise for b, s in zip(self._expected, self._seen, strict=True))
        weight, count, squares, time, products = sums
        determinant = weight * squares - count * count
        self._variances = squares / determinant, count / determinant, weight / determinant
        self.intercept = (squares * time - count * products) / determinant
        self.slope = (weight * products - count * time) / determinant

    def __call__(self, count: float, z: float = 0.0) -> float:
        """Return the time for a count, ns, `z` standard errors above its estimate."""
        if not self._is_solved:
            self._solve()
        error, mixed, slope = self._variances
        variance = error - 2 * mixed * count + slope * count * count
        return self.intercept + self.slope * count + z * math.sqrt(max(0.0, variance))


class Costs:
    """Times with a target, in ns, shared by `running` generations, `drafting` of them with drafts.

    Drafting began `num_disturbances` times. `step_costs` are step times as measured; what they do
    not explain is learned for each power of two of running generations, first from fewer ones.
    """

    def __init__(self, step_costs: Sequence[MeasuredStep] = ()) -> None:
        self._step = StepCosts(step_costs)
        self._lines: dict[tuple[str, int], TimeLine] = {}
        self.running = self.drafting = self.num_disturbances = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Count a generation as running within the context."""
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def _line(self, drafter: str, relative_size: float = 0.0) -> TimeLine:
        """Return the line of a round with a drafter, or of a plain token, besides the step."""
        level = max(1, self.running).bit_length()
        if (drafter, level) not in self._lines:
            fewer = [self._lines[drafter, i] for i in range(level) if (drafter, i) in self._lines]
            step = max(1.0, self._step(max(1, self.running)))
            besides = fewer[-1](0) if fewer else 0.0  # also solves for its slope
            slope = fewer[-1].slope if fewer else 0.0
            if drafter and not fewer:
                besides, slope = 2 * self._line("")(0), relative_size * self.plain_ns()
            self._lines[drafter, level] = TimeLine(besides, slope, step / 2)
        return self._lines[drafter, level]

    def plain_ns(self, z: float = 0.0) -> float:
        """Return the time per token of plain decoding while nobody drafts."""
        step = self._step(max(1, self.running))
        return max(1.0, step / 2, step + self._line("")(0, z))

    def round_ns(self, drafter: str, relative_size: float, k: int, z: float = 0.0) -> float:
        """Return the time of a round of `k` drafts, `z` standard errors up."""
        return max(1.0, self._shared_step(k) + self._line(drafter, relative_size)(k, z))

    def _shared_step(self, k: int) -> float:
        """Return the time of a step, and the delay that `k` drafts cause to all others in it."""
        running = max(1, self.running)
        alone = self._step(running)
        return alone + running * (self._step(running + k) - alone)

    def reading_ns(self, relative_size: float, num_tokens: int) -> float:
        """Return the time in which a drafter reads tokens, by its size, for all whom it delays."""
        return max(1, self.running) * relative_size * (self._step(1 + num_tokens) - self._step(1))

    def decoded(self, num_tokens: int, duration_ns: float) -> None:
        """Record tokens of plain decoding while nobody drafted."""
        token_ns = duration_ns / num_tokens
        if not self._step.measured:
            self._step = StepCosts([MeasuredStep(1, round(token_ns))])
            self._lines.clear()
        self._line("").observe(0, token_ns - self._step(max(1, self.running)), num_tokens)

    def ended(self, drafter: str, relative_size: float) -> None:
        """Let times with a drafter count less after each text, so that it is tried again."""
        self._line(drafter, relative_size).fade()

    def checked(self, drafter: str, relative_size: float, k: int, duration_ns: float) -> None:
        """Record a round of `k` drafts."""
        self._line(drafter, relative_size).observe(k, duration_ns - self._shared_step(k))
