"""Whether generations that run at once draft at all: found by trying both. Pure.

What a generation that drafts costs the others no single one can see: on a machine that is busy
they get slower together. So all decode plainly for a while, then all may draft for a moment, and
what gave everybody more tokens a second goes on. One generation alone decides by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from statistics import fmean

LEAST_WINDOW_NS, WINDOW_TOKENS = 200e6, 8
"""The time in which speed is measured once: so long, and so many plain tokens of each generation,
at least. One such speed tells little: on a busy machine they differ by a quarter."""
BETTER = 1.03
"""Drafting goes on while it is so many times as fast as plain decoding."""
FIRST_REST, LONGEST_REST = 16, 512
"""Windows of plain decoding before drafting is tried among two, twice as many among twice as many:
all read their texts when they begin to draft, and it pays the less. At least doubled each time it
was no better.
"""
COST = 0.01
"""Share of the tokens that trials may cost: who lost more in one rests longer."""
LATEST = 16
"""Windows that tell the speed now, of plain decoding and of drafting."""
LEAST_LEVEL = (2).bit_length()
PROBES = 1
"""Windows of plain decoding behind so many of drafting."""


class LoadTrials:
    """With one target, for each number of generations at once, by powers of two."""

    def __init__(self) -> None:
        self._trials: dict[int, LoadTrial] = {}

    def at(self, num_running: int) -> LoadTrial | None:
        """What was found with so many at once; None where one decides by itself."""
        if num_running < 2:
            return None
        level = num_running.bit_length()
        if level not in self._trials:
            # Steps with more generations are longer, so what does not pay for fewer waits here too.
            fewer = [self._trials[i].rest for i in range(level) if i in self._trials]
            rest = min(LONGEST_REST, FIRST_REST << (level - LEAST_LEVEL))
            self._trials[level] = LoadTrial(max([*fewer, rest]))
        return self._trials[level]


class LoadTrial:
    """At one level of load; `drafts` says whether those that run may draft now.

    `rest` are the windows of plain decoding before the next trial.
    """

    def __init__(self, rest: int = FIRST_REST) -> None:
        self._first_rest = self.rest = rest
        self._lost = 0.0  # in a trial, in windows
        self._plain: deque[float] = deque(maxlen=LATEST)
        self._drafted: deque[float] = deque(maxlen=LATEST)
        self._turns = self._take_turns()
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

    def _take_turns(self) -> Generator[bool, float]:
        """Whether the next window drafts; is sent the speed in it."""
        while True:
            yield from self._measure(False, self.rest)
            self._drafted.clear()
            self.rest = 2 * self.rest
            self._lost = 0.0
            while (yield from self._measure(True, LATEST)):
                self.rest = self._first_rest
                yield from self._measure(False, PROBES)
            self.rest = min(LONGEST_REST, max(self.rest, round(self._lost / COST)))

    def _measure(self, drafts: bool, windows: int) -> Generator[bool, float, bool]:
        """Take the speeds of so many windows, behind one in which generations change over.

        Of drafting only while it pays, which is the answer.
        """
        speeds = self._drafted if drafts else self._plain
        for window in range(windows + 1):
            speed = yield drafts
            if window:
                speeds.append(speed)
            if drafts:
                plain = fmean(self._plain)
                self._lost += 1 - speed / plain
                if window and fmean(speeds) <= BETTER * plain:
                    return False
        return True
