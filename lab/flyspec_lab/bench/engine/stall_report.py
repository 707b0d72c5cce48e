"""Results of `flyspec bench prefill-stall`: times by phase, for each chunk size."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flyspec_lab.bench.options import StallOptions
from flyspec_lab.bench.summaries import Distribution as Distribution

PHASES = ("before", "during", "after")


class StepRecord(NamedTuple):
    """A turn of the engine's loop, in ns of the monotonic clock, and what it ran."""

    begin_ns: int
    end_ns: int
    sequences: int
    tokens: int

    @property
    def milliseconds(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e6


@dataclass(frozen=True)
class PlottedStep:
    """A step of one arrival; `begin_ms` counts from the prompt's arrival."""

    begin_ms: float
    duration_ms: float
    tokens: int


@dataclass(frozen=True)
class ChunkReport:
    """A chunk size over all arrivals. `steps` and `rounds` are by phase.

    A round's time is that in the verify service, including its wait for a step. `chunk_ms` is the
    time of the prompt's last whole chunk alone; `added_p99_ms`, the p99 of the steps during minus
    that before, should not exceed it (`bounded`). `prompt_ms`: until the prompt was answered.
    """

    chunk: int
    cut: bool
    steps: dict[str, Distribution]
    rounds: dict[str, Distribution]
    mean_sequences: float
    chunk_ms: float
    added_p99_ms: float
    bounded: bool
    prompt_ms: float
    timeline: Sequence[PlottedStep]

    @property
    def name(self) -> str:
        return f"chunks of {self.chunk:,}" if self.cut else "one chunk"


@dataclass(frozen=True)
class StallReport:
    """All chunk sizes; the last one is the whole prompt."""

    model: str
    dtype: str
    device: str
    threads: int
    options: StallOptions
    chunks: Sequence[ChunkReport]


@dataclass(frozen=True)
class Arrival:
    """One arrival of the prompt; rounds are (time of the answer in ns, duration in ms).

    `chunk_ms`: a chunk's step just before, while nothing else ran.
    """

    steps: Sequence[StepRecord]
    rounds: Sequence[tuple[int, float]]
    arrived_ns: int
    answered_ns: int
    chunk_ms: float

    def phase(self, begin_ns: int, end_ns: int) -> str:
        """Return the phase of something that ran from `begin_ns` to `end_ns`."""
        if end_ns <= self.arrived_ns:
            return "before"
        return "during" if begin_ns < self.answered_ns else "after"


def report_chunk(chunk: int, arrivals: Sequence[Arrival], options: StallOptions) -> ChunkReport:
    steps: dict[str, list[float]] = {phase: [] for phase in PHASES}
    rounds: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for arrival in arrivals:
        for record in arrival.steps:
            steps[arrival.phase(record.begin_ns, record.end_ns)].append(record.milliseconds)
        for answered, milliseconds in arrival.rounds:
            begin = answered - int(milliseconds * 1e6)
            rounds[arrival.phase(begin, answered)].append(milliseconds)
    by_phase = {phase: Distribution.of(of) for phase, of in steps.items()}
    chunk_ms = statistics.median(a.chunk_ms for a in arrivals)
    added_p99_ms = by_phase["during"].p99_ms - by_phase["before"].p99_ms
    # The plot shows the arrival whose longest step is the median one.
    by_longest = sorted(arrivals, key=lambda a: max(r.milliseconds for r in a.steps))
    typical = by_longest[len(arrivals) // 2]
    return ChunkReport(
        chunk=chunk,
        cut=chunk < options.prompt_tokens,
        steps=by_phase,
        rounds={phase: Distribution.of(of) for phase, of in rounds.items()},
        mean_sequences=statistics.mean(r.sequences for a in arrivals for r in a.steps),
        chunk_ms=chunk_ms,
        added_p99_ms=added_p99_ms,
        bounded=added_p99_ms <= chunk_ms,
        prompt_ms=statistics.median((a.answered_ns - a.arrived_ns) / 1e6 for a in arrivals),
        timeline=[
            PlottedStep((r.begin_ns - typical.arrived_ns) / 1e6, r.milliseconds, r.tokens)
            for r in typical.steps
        ],
    )
