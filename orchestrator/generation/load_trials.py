"""Whether generations that run at once draft at all: found by trying both. Pure.

What a generation that drafts costs the others no single one can see: on a machine that is busy
they get slower together. So all decode plainly for a while, then all may draft for a moment, and
what gave everybody more tokens a second goes on. One generation alone decides by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator

LEAST_WINDOW_NS, WINDOW_TOKENS = 100e6, 16
"""The time in which speed is measured once: so long, and so many plain tokens of each generation,
at least."""
BETTER = 1.03
"""Drafting begins where it is so many times as fast as plain decoding, twice in a row."""
FIRST_REST, LONGEST_REST = 4, 256
"""Windows of plain decoding before drafting is tried again; doubled each time it was no better."""
LATEST = 4
"""Windows of plain decoding that tell its speed now, at most."""
DRAFTING = 16
"""Windows of drafting between two of plain decoding."""


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
    rest = FIRST_REST
    while True:
        wins = 0
        plain = yield from _speed(False, rest)
        while wins < 2 and (yield from _speed(True, 1)) > BETTER * plain:
            wins += 1
            plain = yield from _speed(False, 1)
        rest = min(LONGEST_REST, 2 * rest) if wins < 2 else FIRST_REST
        while wins == 2:
            drafted = yield from _speed(True, DRAFTING)
            plain = yield from _speed(False, 1)
            wins -= drafted < plain


def _speed(drafts: bool, windows: int) -> Generator[bool, float, float]:
    """The mean speed of the latest windows, behind one in which generations change over."""
    yield drafts
    speeds = []
    for _ in range(windows):
        speeds.append((yield drafts))
    latest = speeds if drafts else speeds[-LATEST:]
    return sum(latest) / len(latest)
