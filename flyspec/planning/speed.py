"""The gain of a draft model by calculation, an upper bound: messages and judging take no time.

A step takes as long as reading its weights and caches, or computing its rows if that is longer.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from flyspec.planning.devices import DeviceGroup
from flyspec.planning.shapes import Shape

ACCEPTANCE = 0.8
"""Default probability that the target accepts a draft, given those before it: code and other easy
texts; prose has less."""
CONTEXT = 2048
"""Default tokens of a session."""
MOST_DRAFTS = 16


class Placed(NamedTuple):
    """A model on its devices."""

    shape: Shape
    on: DeviceGroup

    def seconds(self, rows: int, context: int) -> float:
        """Return the time of a step of a session that holds `context` tokens."""
        _, device, size = self.on
        read = self.shape.read_bytes(rows) + context * self.shape.kv_bytes
        return max(read / device.bandwidth, self.shape.flops(rows) / device.flops) / size


class PlannedRound(NamedTuple):
    """A round of K drafts: its tokens and seconds, and tokens/s over those of plain decoding."""

    k: int
    tokens: float
    seconds: float
    gain: float


class SpeedPlan:
    """One session of a pair: `plain_s` are the seconds of a token without drafts."""

    def __init__(self, target: Placed, draft: Placed, acceptance: float, context: int) -> None:
        self.target, self.draft, self.acceptance, self.context = target, draft, acceptance, context
        self.plain_s = target.seconds(1, context)
        self.draft_s = draft.seconds(1, context)

    @cached_property
    def rounds(self) -> list[PlannedRound]:
        """Rounds of 1 to `MOST_DRAFTS` drafts."""
        return [self._of(k) for k in range(1, MOST_DRAFTS + 1)]

    def _of(self, k: int) -> PlannedRound:
        tokens = sum(self.acceptance**i for i in range(k + 1))
        seconds = k * self.draft_s + self.target.seconds(k + 1, self.context)
        return PlannedRound(k, tokens, seconds, tokens * self.plain_s / seconds)

    @property
    def best(self) -> PlannedRound:
        return max(self.rounds, key=lambda r: r.gain)

    @property
    def pays(self) -> bool:
        return self.best.gain > 1

    @property
    def verdict(self) -> str:
        """The verdict on drafting in words: if it pays, the best K."""
        given = f"at an acceptance of {self.acceptance:g}"
        step = f"a draft step takes {self.draft_s / self.plain_s:.2f} of the target's"
        if not self.pays:
            return f"drafting will not pay {given}: {step}; use a smaller draft model"
        losing = [r.k for r in self.rounds if r.gain <= 1]
        limit = f"; K = {losing[0]} or more will not pay" if losing else ""
        return (
            f"{given}, K = {self.best.k} is best: at most {self.best.gain:.2f} times plain "
            f"decoding{limit} ({step})"
        )
