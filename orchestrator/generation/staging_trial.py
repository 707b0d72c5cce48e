"""Decides by measurement whether rounds are staged: whether they are faster for it.

Staging does not change how many tokens a round emits, so the time of a round decides. It pays where
trips take long or drafts as long as a step of the target, and costs where both models share their
processors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from statistics import fmean

TRIAL_ROUNDS = 24
"""Rounds with drafts for which a way is tried."""
FIRST_REST, LONGEST_REST = 96, 1536
"""Rounds between trials; twice as many after each that changes nothing."""
SKIPPED = 2
"""Rounds after a change that do not count: those before it still delay them."""
LATEST = 64
"""Recent rounds averaged."""
BETTER = 0.98
"""Ratio of round times below which staging counts as faster."""


class StagingTrial:
    """The trial for one drafter; `stages` says whether the next round should be staged.

    With `always`, it is, without a trial.
    """

    def __init__(self, always: bool = False) -> None:
        self._always = always
        self._round_ns = {way: deque[int](maxlen=LATEST) for way in (False, True)}
        self._turns = self._take_turns()
        self.stages = next(self._turns) or always

    def ran(self, staged: bool, round_ns: int) -> None:
        """Record the time of a round with drafts, and choose for the next one.

        One that could not be staged does not count.
        """
        if staged is self.stages and not self._always:
            self.stages = self._turns.send(round_ns)

    def _take_turns(self) -> Generator[bool, int]:
        """Yield whether the next round is staged; receives its time."""
        chosen, rest = False, FIRST_REST
        yield from self._run(chosen, TRIAL_ROUNDS)
        while True:
            self._round_ns[not chosen].clear()
            yield from self._run(not chosen, TRIAL_ROUNDS)
            better = fmean(self._round_ns[True]) < BETTER * fmean(self._round_ns[False])
            rest = FIRST_REST if better is not chosen else min(2 * rest, LONGEST_REST)
            chosen = better
            yield from self._run(chosen, rest)

    def _run(self, way: bool, num_rounds: int) -> Generator[bool, int]:
        for index in range(num_rounds):
            round_ns = yield way
            if index >= SKIPPED:
                self._round_ns[way].append(round_ns)
