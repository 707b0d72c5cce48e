"""A circuit breaker: after a failure, a rest, then one trial. It has no clock of its own.

A service that does not answer is probed by its watcher (`Describe`). One that answers but drafts
nonsense, or too late, is only found out by the trial, which is the watcher's as well.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from flyspec.values.admin import BreakerState

SETTLED_S = 20.0
"""Seconds without a failure after which earlier failures are forgotten."""
HUNG_FIRST_S, HUNG_LONGEST_S = 1.0, 30.0
"""Seconds of rest after a timeout, doubling each time, since every attempt costs a timeout."""
MAX_FAULTS = 3
"""Faults (invalid responses) after which a service is out."""
OUT_FIRST_S, OUT_LONGEST_S = 30.0, 1800.0
"""Seconds of rest when out, doubling each time."""
FORGIVEN_S = 600.0
"""Seconds without a fault, after the rest, until earlier faults are forgotten."""


class Breaker:
    """The circuit breaker of one replica. Times are in seconds of any one clock.

    The rest after a failure doubles from `first_s` to `longest_s`, minus a random share of up to
    half, so that replicas that failed together do not return together. With `trials`, an answer to
    a probe admits one session, from the first one on; its success admits the others. A trial
    without a result expires after `trial_s`.

    The rest is reset after `SETTLED_S` without a failure, not by the first success: a drafter may
    be fast enough for the one session on trial but too slow for all, and every return costs each
    session a deadline.

    A service that `hung` may still answer probes. So it rests longer, always gets a trial, and a
    success resets its rest only after `SETTLED_S` as well.

    A service may also send invalid responses (`faulted`). Since it may work in between, it returns
    quickly at first, but after `MAX_FAULTS` it is out, and its long rests grow each time.
    """

    def __init__(
        self,
        first_s: float = 0.05,
        longest_s: float = 5.0,
        trials: bool = True,
        trial_s: float = 10.0,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._trials, self._trial_s, self._jitter = trials, trial_s, jitter
        self._failures = self._faults = self._hangs = 0
        self._worked = True  # since it hung
        self._failed_at = self._forgiven_at = 0.0
        self._trial_until = 0.0
        self.state = BreakerState.HALF_OPEN if trials else BreakerState.CLOSED
        self.retry_at = 0.0
        """Time at which an open breaker may close again."""
        self.is_out = False
        """True if it is open because of too many faults."""

    def allows(self, now: float) -> bool:
        if self.state is BreakerState.HALF_OPEN:
            return now >= self._trial_until
        return self.state is BreakerState.CLOSED

    def begin(self, now: float) -> None:
        """Record the start of a session; while half-open, it becomes the trial."""
        if self.state is BreakerState.HALF_OPEN:
            self._trial_until = now + self._trial_s

    def abandoned(self) -> None:
        """Record that the trial ended without a result."""
        self._trial_until = 0.0

    def succeeded(self) -> None:
        """Record that the service did its work; ignored while it is out."""
        if self.is_out:
            return
        self._worked = True
        self._close()

    def answered(self, now: float) -> None:
        """Record an answer to a probe; ignored during the rest."""
        if self.state is BreakerState.OPEN and now >= self.retry_at:
            self.is_out = False
            if self._trials or not self._worked:
                self.state = BreakerState.HALF_OPEN
                self._trial_until = 0.0
            else:
                self._close()

    def failed(self, now: float) -> None:
        """Record a failure, or no answer to a probe; concurrent failures count as one."""
        if self.state is BreakerState.OPEN and now < self.retry_at:
            return
        if now - self._failed_at > SETTLED_S:
            self._failures = 0
        self._failed_at = now
        rest = min(self._longest_s, self._first_s * 2.0**self._failures)
        self._rest(now, rest)
        self._failures = min(self._failures + 1, 32)

    def hung(self, now: float) -> None:
        """Record that an accepted request timed out; concurrent timeouts count as one."""
        if self.state is BreakerState.OPEN and now < self.retry_at:
            return
        if self._worked and now - self.retry_at > SETTLED_S:
            self._hangs = 0
        self._worked, self._failed_at = False, now
        self._rest(now, min(HUNG_LONGEST_S, HUNG_FIRST_S * 2.0**self._hangs))
        self._hangs = min(self._hangs + 1, 32)

    def faulted(self, now: float) -> None:
        """Record an invalid response; concurrent faults count as one."""
        if self.state is BreakerState.OPEN and now < self.retry_at:
            return
        if now > self._forgiven_at:
            self._faults = 0
        self._faults = min(self._faults + 1, 32)
        if self._faults < MAX_FAULTS:
            self.failed(now)
        else:
            self.is_out = True
            self._rest(now, min(OUT_LONGEST_S, OUT_FIRST_S * 2.0 ** (self._faults - MAX_FAULTS)))
        self._forgiven_at = self.retry_at + FORGIVEN_S

    def restarted(self, now: float) -> None:
        """Forget the faults and hangs of the previous process: a new one is answering."""
        self._faults = self._hangs = 0
        self._worked = True
        self.retry_at = min(self.retry_at, now)

    def _close(self) -> None:
        self.state = BreakerState.CLOSED
        self._trial_until = 0.0

    def _rest(self, now: float, seconds: float) -> None:
        self.retry_at = now + seconds * (1.0 - 0.5 * self._jitter())
        self.state = BreakerState.OPEN
