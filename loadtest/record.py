"""What became of one request. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Outcome = Literal["complete", "refused", "cancelled", "failed"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
Metric = Literal["ttft", "tpot", "e2e"]
METRICS: tuple[Metric, ...] = get_args(Metric)
"""Time to first token, time per output token, end to end."""


@dataclass(frozen=True, slots=True)
class Record:
    """A request. Times in seconds since the test began.

    `planned` is when it was due, `sent` when it left; they differ where requests come by
    themselves and the generator is late. `first` is when its first tokens came. `refused` is for
    want of room (`retry_after_s` as the refusal said, if it did), `cancelled` by its own client on
    purpose, `failed` everything else that was not completed. `moves` counts how often the operator
    moved it to another drafter, `longest_pause_ms` is the longest that this took.
    """

    phase: str
    variant: str
    planned: float
    sent: float
    ended: float
    outcome: Outcome
    first: float | None = None
    tokens: int = 0
    rounds: int = 0
    moves: int = 0
    longest_pause_ms: float = 0.0
    retry_after_s: float | None = None
    error: str = ""

    def metric(self, name: Metric) -> float | None:
        """A time, ms, of a completed request; None where it has none.

        `ttft` and `e2e` count from when it was due. `tpot` is the time from the first tokens to the
        end over the tokens less one: a message may bring several, so it is a mean.
        """
        if self.outcome != "complete":
            return None
        if name == "e2e":
            return 1e3 * (self.ended - self.planned)
        if self.first is None:
            return None
        if name == "ttft":
            return 1e3 * (self.first - self.planned)
        return 1e3 * (self.ended - self.first) / (self.tokens - 1) if self.tokens > 1 else None
