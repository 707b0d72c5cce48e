"""Decides by trial whether concurrent generations should draft at all.

A single generation cannot see what its drafting costs the others: on a busy machine, all slow down
together. So all decode without drafts for a while, then all may draft briefly, and whichever gave
more tokens per second overall continues. A lone generation decides for itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from statistics import fmean

LEAST_WINDOW_NS, WINDOW_TOKENS = 200e6, 8
"""Minimum length of one speed measurement, in ns and in plain tokens of each generation. A single
one says little: on a busy machine they vary by a quarter."""
BETTER = 1.03
"""Speedup over plain decoding above which drafting continues."""
FIRST_REST, LONGEST_REST = 16, 512
"""Windows of plain decoding before two generations try drafting; twice as many for twice as many
generations, since all drafters first read their sequences, and drafting pays less. At least doubled
after each unsuccessful trial.
"""
COST = 0.01
"""Share of tokens that trials may cost; a costlier trial is followed by a longer rest."""
LATEST = 16
"""Recent windows averaged for the speed of plain decoding, and of drafting."""
LEAST_LEVEL = (2).bit_length()
PROBES = 1
"""Windows of plain decoding after every `LATEST` windows of drafting."""


class LoadTrials:
    """The trials for one target, by number of concurrent generations in powers of two."""

    def __init__(self) -> None:
        self._trials: dict[int, LoadTrial] = {}

    def at(self, num_running: int) -> LoadTrial | None:
        """Return the trial for that many generations; None if one decides for itself."""
        if num_running < 2:
            return None
        level = num_running.bit_length()
        if level not in self._trials:
            # With more generations, steps take longer, so rest at least as long as with fewer.
            fewer = [self._trials[i].rest for i in range(level) if i in self._trials]
            rest = min(LONGEST_REST, FIRST_REST << (level - LEAST_LEVEL))
            self._trials[level] = LoadTrial(max([*fewer, rest]))
        return self._trials[level]


class LoadTrial:
    """The trial at one level of load; `drafts` says whether generations may draft now.

    `rest` is the number of windows of plain decoding before the next trial.
    """

    def __init__(self, rest: int = FIRST_REST) -> None:
        self._first_rest = self.rest = rest
        self._lost = 0.0  # by the current trial, in windows
        self._plain: deque[float] = deque(maxlen=LATEST)
        self._drafted: deque[float] = deque(maxlen=LATEST)
        self._turns = self._take_turns()
        self.drafts = next(self._turns)
        self._tokens = self._time_ns = 0.0  # in this window, per generation

    def emitted(self, num_tokens: int, time_ns: float, num_running: int, plain_ns: float) -> None:
        """Add the tokens of one of `num_running` generations; a plain token takes `plain_ns`."""
        self._tokens += num_tokens / num_running
        self._time_ns += time_ns / num_running
        if self._time_ns >= max(LEAST_WINDOW_NS, WINDOW_TOKENS * plain_ns):
            speed = self._tokens / self._time_ns
            self._tokens = self._time_ns = 0.0
            self.drafts = self._turns.send(speed)

    def _take_turns(self) -> Generator[bool, float]:
        """Yield whether the next window drafts; receives the speed measured in it."""
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
        """Measure the speeds of `windows` windows, after one in which generations switch over.

        Stops early if drafting does not pay; returns whether it did.
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
