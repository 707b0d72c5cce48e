"""What `stall` measures and what it found: times by phase, for each size of chunk."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

PHASES = ("before", "during", "after")
GROWTH = 64
"""Tokens that a session grows by before it goes back to where it began."""


@dataclass(frozen=True)
class StallOptions:
    """What is measured: `repeats` arrivals a size of chunk, `steps` steps before and after each.

    `max_num_batched_tokens` bounds a step as in the verify service; a prompt that is not cut raises
    it as far as needed.
    """

    sessions: int = 32
    num_speculative_tokens: int = 8
    context: int = 128
    prompt_tokens: int = 1500
    chunks: Sequence[int] = (512,)
    max_num_batched_tokens: int = 2048
    repeats: int = 5
    steps: int = 60

    @property
    def max_model_len(self) -> int:
        """Longest sequence of any session."""
        longest = max(self.context + GROWTH, self.prompt_tokens)
        return longest + self.num_speculative_tokens + 2

    @property
    def all_chunks(self) -> list[int]:
        """The configured sizes, and that of the whole prompt."""
        return [*dict.fromkeys(c for c in self.chunks if c < self.prompt_tokens),
                self.prompt_tokens]  # fmt: skip


class StepRecord(NamedTuple):
    """A turn of the engine's loop, in ns of the monotonic clock, and what was in it."""

    begin_ns: int
    end_ns: int
    sequences: int
    tokens: int

    @property
    def milliseconds(self) -> float:
        """How long it took."""
        return (self.end_ns - self.begin_ns) / 1e6


@dataclass(frozen=True)
class Distribution:
    """Times, ms; NaN of none."""

    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> Distribution:
        """Each figure is one of the times."""
        times = milliseconds or [float("nan")]
        figures = np.percentile(times, (50, 99, 100), method="nearest")
        return cls(len(milliseconds), *map(float, figures))


@dataclass(frozen=True)
class PlottedStep:
    """A step of one arrival; `begin_ms` counts from the prompt's arrival."""

    begin_ms: float
    duration_ms: float
    tokens: int


@dataclass(frozen=True)
class ChunkReport:
    """A size of chunk over all arrivals. `steps` and `rounds` are by phase.

    A round's time is that in the verify service, its wait for a step included. `chunk_ms` is what
    the prompt's last whole chunk takes alone; `added_p99_ms` is the p99 of the steps during less
    that before, which should not exceed it. `prompt_ms`: until the prompt was answered.
    """

    chunk: int
    cut: bool
    steps: dict[str, Distribution]
    rounds: dict[str, Distribution]
    mean_sequences: float
    chunk_ms: float
    added_p99_ms: float
    prompt_ms: float
    timeline: Sequence[PlottedStep]

    @property
    def bounded(self) -> bool:
        """The prompt lengthened the p99 step by no more than its chunk's own cost."""
        return self.added_p99_ms <= self.chunk_ms


@dataclass(frozen=True)
class StallReport:
    """All sizes of chunk; the last one is the whole prompt."""

    model: str
    dtype: str
    device: str
    threads: int
    options: StallOptions
    chunks: Sequence[ChunkReport]

    def to_document(self) -> dict[str, Any]:
        """The report as JSON."""
        document = asdict(self)
        for entry, report in zip(document["chunks"], self.chunks, strict=True):
            entry["bounded"] = report.bounded
        return document


@dataclass(frozen=True)
class Arrival:
    """One arrival of the prompt; round times are (when answered, ns; time, ms).

    `chunk_ms`: a chunk's step just before, when nothing else ran.
    """

    steps: Sequence[StepRecord]
    rounds: Sequence[tuple[int, float]]
    arrived_ns: int
    answered_ns: int
    chunk_ms: float

    def phase(self, begin_ns: int, end_ns: int) -> str:
        """Of something that took from `begin_ns` to `end_ns`."""
        if end_ns <= self.arrived_ns:
            return "before"
        return "during" if begin_ns < self.answered_ns else "after"


def report_chunk(chunk: int, arrivals: Sequence[Arrival], options: StallOptions) -> ChunkReport:
    """What a chunk's arrivals say."""
    steps: dict[str, list[float]] = {phase: [] for phase in PHASES}
    rounds: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for arrival in arrivals:
        for record in arrival.steps:
            steps[arrival.phase(record.begin_ns, record.end_ns)].append(record.milliseconds)
        for answered, milliseconds in arrival.rounds:
            begin = answered - int(milliseconds * 1e6)
            rounds[arrival.phase(begin, answered)].append(milliseconds)
    by_phase = {phase: Distribution.of(of) for phase, of in steps.items()}
    # The arrival whose longest step is the median one stands for all in the plot.
    by_longest = sorted(arrivals, key=lambda a: max(r.milliseconds for r in a.steps))
    typical = by_longest[len(arrivals) // 2]
    return ChunkReport(
        chunk=chunk,
        cut=chunk < options.prompt_tokens,
        steps=by_phase,
        rounds={phase: Distribution.of(of) for phase, of in rounds.items()},
        mean_sequences=statistics.mean(r.sequences for a in arrivals for r in a.steps),
        chunk_ms=statistics.median(a.chunk_ms for a in arrivals),
        added_p99_ms=by_phase["during"].p99_ms - by_phase["before"].p99_ms,
        prompt_ms=statistics.median((a.answered_ns - a.arrived_ns) / 1e6 for a in arrivals),
        timeline=[
            PlottedStep((r.begin_ns - typical.arrived_ns) / 1e6, r.milliseconds, r.tokens)
            for r in typical.steps
        ],
    )
