"""Whether generations that run at once draft at all: found by trying both. Pure.

What a generation that drafts costs the others no single one can see: on a machine that is busy
they get slower together. So all decode plainly for a while, then all may draft for a moment, and
what gave everybody more tokens a second goes on. One generation alone decides by itself.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator
from statistics import fmean

LEAST_WINDOW_NS, WINDOW_TOKENS = 100e6, 8
"""The time in which speed is measured once: so long, and so many plain tokens of each generation,
at least. One such speed tells little: on a busy machine they differ by a quarter."""
BETTER = 1.03
"""Drafting goes on while it is so many times as fast as plain decoding."""
FIRST_REST, LONGEST_REST = 16, 512
"""Windows of plain decoding before drafting is tried; doubled each time it was no better."""
LATEST = 32
"""Windows that tell the speed now, of plain decoding and of drafting."""
PROBES = 2
"""Windows of plain decoding behind so many of drafting."""


class LoadTrials:
    """With one target, for each number of generations at once, by powers of two."""

    def __init__(self) -> None:
        self._trials: defaultdict[int, LoadTrial] = defaultdict(LoadTrial)

    def at(self, num_running: int) -> LoadTrial | None:
        """What was found with so many at once; None where one decides by itself."""
        return self._trials[num_running.bit_length()] if num_running > 1 else None


class LoadTrial:
    """At one level of load; `drafts` says whether those that run may draft now."""

    def __init__(self) -> None:
        self._turns = _turns()
        self.drafts = next(self._turns)
        self._tokens = self._time_ns = 0.0  # in this window, of a generation

    def emitted(self, num_tokens: int, time_ns: float, num_running: int, plain_ns: float) -> None:
        """One of so many had so many tokens in this time; a plain token takes `plain_ns`."""
        self._tokens += num_tokens / num_running
        self._time_ns += time_ns / num_running
        if self._time_ns >= max(LEAST_WINDOW_NS, WINDOW_TOKENS * plain_ns):
            speed = self._tokens / self._time_ns
            self._tokens = self._time_ns = 0.0
            self.drafts = self._turns.send(speed)


def _turns() -> Generator[bool, float]:
    """Whether the next window drafts; is sent the speed in it."""
    plain: deque[float] = deque(maxlen=LATEST)
    drafted: deque[float] = deque(maxlen=LATEST)

    def pays() -> bool:
        return fmean(drafted) > BETTER * fmean(plain)

    rest = FIRST_REST
    while True:
        yield from _measure(False, rest, plain)
        drafted.clear()
        rest = min(LONGEST_REST, 2 * rest)
        while (yield from _measure(True, LATEST, drafted, pays)):
            rest = FIRST_REST
            yield from _measure(False, PROBES, plain)


def _measure(
    drafts: bool, windows: int, speeds: deque[float], go_on: Callable[[], bool] = lambda: True
) -> Generator[bool, float, bool]:
    """Add the speeds of so many windows, behind one in which generations change over.

    Whether it went on until then.
    """
    yield drafts
    for _ in range(windows):
        speeds.append((yield drafts))
        if not go_on():
            return False
    return True
