"""A circuit breaker: after a failure nothing is sent for a while, then one trial. Pure: told times.

A service that does not answer is asked again and again by its watcher (`Describe`); one that
answers but drafts nonsense, or too late, is found out only by the trial.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from flyspec.values.admin import BreakerState

SETTLED_S = 20.0
"""A service that did not fail for so long is as good as one that never did."""
HUNG_FIRST_S, HUNG_LONGEST_S = 1.0, 30.0
"""Its rest when it said nothing in time: twice as long each time, as every try costs a timeout."""
MAX_FAULTS = 3
"""So many times what a service sends may be wrong; then it is out."""
OUT_FIRST_S, OUT_LONGEST_S = 30.0, 1800.0
"""Its rest when it is out: twice as long each time."""
FORGIVEN_S = 600.0
"""Without a fault for so long after its rest, it has done none."""


class Breaker:
    """Of one replica. Times are in seconds of any one clock.

    The rest after a failure doubles from `first_s` to `longest_s`, each time less up to half of it,
    so that those who failed together do not come back together. With `trials`, an answer lets one
    through, and its success the others; a trial that nothing is heard of counts for `trial_s`.

    The rest starts anew after `SETTLED_S` without a failure, not with the first success: a drafter
    may be fast enough for the one on trial and too slow for all who follow, and every return of
    theirs costs each a deadline.

    One that `hung` may go on to say that it is there. So it rests for longer, always gets a trial,
    and a success counts only once `SETTLED_S` are over as well.

    What a service sends may be wrong, too (`faulted`). It may work in between and so come back at
    once, but after `MAX_FAULTS` it is out: it rests for long, and longer each time.
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
        self.state = BreakerState.CLOSED
        self.retry_at = 0.0
        """When an open one is worth asking again."""
        self.is_out = False
        """Whether it rests because too much of what it sent was wrong."""

    def allows(self, now: float) -> bool:
        """Whether something may be sent."""
        if self.state is BreakerState.HALF_OPEN:
            return now >= self._trial_until
        return self.state is BreakerState.CLOSED

    def begin(self, now: float) -> None:
        """Something is sent, which `allows` allowed."""
        if self.state is BreakerState.HALF_OPEN:
            self._trial_until = now + self._trial_s

    def abandoned(self) -> None:
        """What was sent came to no end."""
        self._trial_until = 0.0

    def succeeded(self) -> None:
        """The service did its work; of one that is out, whatever it still does is not heard."""
        if self.is_out:
            return
        self._worked = True
        self._close()

    def answered(self, now: float) -> None:
        """The service said that it is there; not heard before its rest is over."""
        if self.state is BreakerState.OPEN and now >= self.retry_at:
            self.is_out = False
            if self._trials or not self._worked:
                self.state = BreakerState.HALF_OPEN
                self._trial_until = 0.0
            else:
                self._close()

    def failed(self, now: float) -> None:
        """The service failed, or said nothing; many sessions that it fails at once count as one."""
        if self.state is BreakerState.OPEN and now < self.retry_at:
            return
        if now - self._failed_at > SETTLED_S:
            self._failures = 0
        self._failed_at = now
        rest = min(self._longest_s, self._first_s * 2.0**self._failures)
        self._rest(now, rest)
        self._failures = min(self._failures + 1, 32)

    def hung(self, now: float) -> None:
        """The service took what was sent and said nothing in time; many at once count as one."""
        if self.state is BreakerState.OPEN and now < self.retry_at:
            return
        if self._worked and now - self.retry_at > SETTLED_S:
            self._hangs = 0
        self._worked, self._failed_at = False, now
        self._rest(now, min(HUNG_LONGEST_S, HUNG_FIRST_S * 2.0**self._hangs))
        self._hangs = min(self._hangs + 1, 32)

    def faulted(self, now: float) -> None:
        """What the service sent was wrong; faults of many sessions at once count as one."""
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
        """Another process answers: what the one before it did wrong says nothing of it."""
        self._faults = self._hangs = 0
        self._worked = True
        self.retry_at = min(self.retry_at, now)

    def _close(self) -> None:
        self.state = BreakerState.CLOSED
        self._trial_until = 0.0

    def _rest(self, now: float, seconds: float) -> None:
        self.retry_at = now + seconds * (1.0 - 0.5 * self._jitter())
        self.state = BreakerState.OPEN
