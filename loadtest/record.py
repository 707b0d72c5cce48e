"""The record of one request. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

Outcome = Literal["complete", "refused", "cancelled", "failed"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
Metric = Literal["ttft", "tpot", "e2e"]
METRICS: tuple[Metric, ...] = get_args(Metric)
"""Time to first token, time per output token, end to end."""


@dataclass(frozen=True, slots=True)
class Record:
    """A request. Times are in seconds since the test began.

    `planned` is when it was due and `sent` when it was sent; they differ in an open loop whose
    generator is late. `first` is when its first tokens came. It was `refused` if the server had no
    room (`retry_after_s` as the refusal said, if it did), `cancelled` if its client gave it up on
    purpose, `failed` if it did not complete for any other reason. `moves` counts how often the
    operator moved it to another drafter, and `longest_pause_ms` is the longest that took;
    `recoveries` counts recoveries of every kind. A request for a fixed text also has when its
    tokens came (`arrivals`), and whether they are other ones than without disturbance (`differs`).
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
    recoveries: Mapping[str, int] = field(default_factory=dict)
    retry_after_s: float | None = None
    error: str = ""
    arrivals: Sequence[float] = ()
    differs: bool = False

    def metric(self, name: Metric) -> float | None:
        """A time of a completed request in ms; None if it has none.

        `ttft` and `e2e` count from when the request was due. `tpot` is the time from the first
        tokens to the end, divided by the tokens minus one: a mean, since a message may have
        several.
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
