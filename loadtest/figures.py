"""Figures of requests: of a phase, a period; goals and the knee. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.load import OUTCOMES, LoadPhase, Metric, Record
from loadtest.options import Goals, Limits

SETTLE = 0.1
"""Share of a phase that passes before throughput is counted: users do not begin in step."""


@dataclass(frozen=True, slots=True)
class Check:
    """Something that had to hold, and what was found."""

    name: str
    passed: bool
    said: str


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that a share of `values`, in [0, 1], does not exceed; NaN if none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of a time over many requests, in ms; NaN if there are none."""

    count: int
    mean: float
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        mean = sum(values) / len(values) if values else math.nan
        return cls(len(values), mean, *(percentile(values, share) for share in (0.5, 0.99, 1.0)))


def times(records: Sequence[Record], metric: Metric) -> list[float]:
    """Return this time of every request that has one, in ms."""
    return [value for r in records if (value := r.metric(metric)) is not None]


def overlap(begin: float, end: float, first: float, last: float) -> float:
    """Return the share of [first, last] that lies in [begin, end]; of a single moment, 1 or 0."""
    if last <= first:
        return 1.0 if begin <= first < end else 0.0
    return max(0.0, min(end, last) - max(begin, first)) / (last - first)


@dataclass(frozen=True, slots=True)
class Figures:
    """Outcomes and times of requests.

    `requests_per_s` and `tokens_per_s` are of completed requests, each counted for the share of
    its time within the period. `refusal` is the time from sending to the refusal. `goodput` is
    the share of requests, excluding those cancelled by their client, that completed within the
    limits; None without limits.
    """

    sent: int
    complete: int
    refused: int
    cancelled: int
    failed: int
    requests_per_s: float
    tokens_per_s: float
    tokens_per_round: float
    ttft: Spread
    tpot: Spread
    e2e: Spread
    refusal: Spread
    goodput: float | None
    late_p99_ms: float

    @classmethod
    def of(
        cls, records: Sequence[Record], begin: float, end: float, limits: Limits | None = None
    ) -> Figures:
        """Sum up; throughput is that of [begin, end], seconds since the test began."""
        of = {o: [r for r in records if r.outcome == o] for o in OUTCOMES}
        done = of["complete"]
        shares = [overlap(begin, end, r.sent, r.ended) for r in done]
        seconds = max(1e-9, end - begin)
        rounds = sum(r.rounds for r in done)
        asked = len(records) - len(of["cancelled"])
        good = sum(
            all((r.metric(m) or 0.0) <= limit for m, limit in (limits or {}).items()) for r in done
        )
        return cls(
            sent=len(records),
            complete=len(done),
            refused=len(of["refused"]),
            cancelled=len(of["cancelled"]),
            failed=len(of["failed"]),
            requests_per_s=sum(shares) / seconds,
            tokens_per_s=sum(s * r.tokens for s, r in zip(shares, done, strict=True)) / seconds,
            tokens_per_round=sum(r.tokens for r in done) / rounds if rounds else math.nan,
            ttft=Spread.of(times(done, "ttft")),
            tpot=Spread.of(times(done, "tpot")),
            e2e=Spread.of(times(done, "e2e")),
            refusal=Spread.of([1e3 * (r.ended - r.sent) for r in of["refused"]]),
            goodput=good / asked if limits and asked else None,
            late_p99_ms=1e3 * percentile([r.sent - r.planned for r in records], 0.99),
        )


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """A phase that is over. `began` to `sent_until`: requests could begin, seconds of the test."""

    name: str
    series: str
    load: str
    judged: bool
    began: float
    sent_until: float
    figures: Figures

    @classmethod
    def of(
        cls,
        phase: LoadPhase,
        began: float,
        sent_until: float,
        records: Sequence[Record],
        limits: Limits | None = None,
    ) -> PhaseResult:
        """Sum up the phase's requests among `records`."""
        window = (began + SETTLE * (sent_until - began), sent_until)
        mine = [r for r in records if r.phase == phase.name]
        figures = Figures.of(mine, *window, limits)
        return cls(
            phase.name, phase.series, str(phase.load), phase.judged, began, sent_until, figures
        )


def check_goals(goals: Goals, results: Sequence[PhaseResult]) -> list[Check]:
    """Check failures in all phases, and the goals in judged phases."""
    failed = sum(r.figures.failed for r in results)
    checks = [Check("failures", failed == 0, f"{failed} requests failed")]
    for result in (r for r in results if r.judged):
        figures, name = result.figures, result.name
        for metric, bound in (goals.max_p99 or {}).items():
            seen = getattr(figures, metric).p99
            said = f"{name}: {seen:.0f} ms, bound {bound:g} ms"
            checks.append(Check(f"p99 {metric}", seen <= bound, said))
        if goals.min_goodput is not None and figures.goodput is not None:
            said = f"{name}: {figures.goodput:.1%}, bound {goals.min_goodput:.1%}"
            checks.append(Check("goodput", figures.goodput >= goals.min_goodput, said))
    return checks


def knee(steps: Sequence[PhaseResult]) -> int | None:
    """Return the index of the step with the highest throughput over latency (Kleinrock's power).

    Up to the knee throughput grows faster than latency, relatively; beyond it more slowly. None if
    nothing completed, or if the last step is the best: more load may be better still.
    """
    power = [
        s.figures.tokens_per_s / s.figures.e2e.mean if s.figures.e2e.mean > 0 else 0.0
        for s in steps
    ]
    best = max(power, default=0.0)
    return power.index(best) if best > 0 and power[-1] < best else None


def number(value: float) -> str:
    """Write a number with about three digits; a dash if there is none."""
    if not math.isfinite(value):
        return "–"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
