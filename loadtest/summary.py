"""Summaries of requests: of a phase, a variant, a period. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtest.measures import overlap, percentile, quantiles
from loadtest.record import METRICS, OUTCOMES, Metric, Record
from loadtest.work import Closed, LoadPhase

SETTLE = 0.1
"""Share of a phase that passes before throughput is counted: users do not begin in step."""
MAX_BINS = 60

Limits = Mapping[Metric, float]
"""Times, ms, that a request may take."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of a time over many requests, in ms; NaN if there are none."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(
            len(values),
            sum(values) / len(values) if values else math.nan,
            *(percentile(values, share) for share in (0.5, 0.9, 0.99, 1.0)),
        )


def times(records: Sequence[Record], metric: Metric) -> list[float]:
    """Return this time of every request that has one, in ms."""
    return [value for r in records if (value := r.metric(metric)) is not None]


def meets(record: Record, limits: Limits) -> bool:
    if record.outcome != "complete":
        return False
    return all((record.metric(m) or 0.0) <= limit for m, limit in limits.items())


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
    refusals_without_retry: int
    goodput: float | None
    late_p99_ms: float
    moves: int
    longest_pause_ms: float

    @classmethod
    def of(
        cls, records: Sequence[Record], begin: float, end: float, limits: Limits | None = None
    ) -> Figures:
        """Sum up; throughput is that of [begin, end], seconds since the test began."""
        of = {o: [r for r in records if r.outcome == o] for o in OUTCOMES}
        done, refused = of["complete"], of["refused"]
        shares = [overlap(begin, end, r.sent, r.ended) for r in done]
        seconds = max(1e-9, end - begin)
        rounds = sum(r.rounds for r in done)
        asked = len(records) - len(of["cancelled"])
        good = sum(meets(r, limits) for r in done) if limits else 0
        return cls(
            sent=len(records),
            **{outcome: len(such) for outcome, such in of.items()},
            requests_per_s=sum(shares) / seconds,
            tokens_per_s=sum(s * r.tokens for s, r in zip(shares, done, strict=True)) / seconds,
            tokens_per_round=sum(r.tokens for r in done) / rounds if rounds else math.nan,
            ttft=Spread.of(times(done, "ttft")),
            tpot=Spread.of(times(done, "tpot")),
            e2e=Spread.of(times(done, "e2e")),
            refusal=Spread.of([1e3 * (r.ended - r.sent) for r in refused]),
            refusals_without_retry=sum(r.retry_after_s is None for r in refused),
            goodput=good / asked if limits and asked else None,
            late_p99_ms=1e3 * percentile([r.sent - r.planned for r in records], 0.99),
            moves=sum(r.moves for r in records),
            longest_pause_ms=max((r.longest_pause_ms for r in records), default=0.0),
        )


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """A phase that is over. `began` to `sent_until`: requests could begin, seconds of the test.

    `busy` is the share of one core that the generator took. `quantiles` are 101 of each time, ms.
    """

    phase: LoadPhase
    began: float
    sent_until: float
    busy: float
    figures: Figures
    by_variant: Mapping[str, Figures] = field(default_factory=dict)
    quantiles: Mapping[Metric, Sequence[float]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        phase: LoadPhase,
        began: float,
        sent_until: float,
        busy: float,
        records: Sequence[Record],
        limits: Limits | None = None,
    ) -> PhaseResult:
        window = (began + SETTLE * (sent_until - began), sent_until)
        names = list(dict.fromkeys(v.name for v in phase.variants))
        return cls(
            phase=phase,
            began=began,
            sent_until=sent_until,
            busy=busy,
            figures=Figures.of(records, *window, limits),
            by_variant={
                name: Figures.of([r for r in records if r.variant == name], *window, limits)
                for name in names
                if len(names) > 1
            },
            quantiles={m: quantiles(times(records, m)) for m in METRICS},
        )

    def to_document(self) -> dict[str, Any]:
        load = self.phase.load
        return {
            "name": self.phase.name,
            "series": self.phase.series,
            "judged": self.phase.judged,
            "load": str(load),
            "users": load.users if isinstance(load, Closed) else None,
            "offered_requests_per_s": None if isinstance(load, Closed) else load.rate,
            "began_s": self.began,
            "seconds": self.sent_until - self.began,
            "generator_busy": self.busy,
            **to_document(self.figures),
            "by_variant": {n: to_document(f) for n, f in self.by_variant.items()},
            "quantiles_ms": {m: list(q) for m, q in self.quantiles.items()},
        }


def to_document(figures: Figures) -> dict[str, Any]:
    """Figures as JSON: times get `_ms`."""
    found: dict[str, Any] = {}
    for name in Figures.__slots__:
        value = getattr(figures, name)
        if isinstance(value, Spread):
            found[f"{name}_ms"] = {n: getattr(value, n) for n in Spread.__slots__}
        else:
            found[name] = value
    return found


def timeline(records: Sequence[Record], seconds: float) -> dict[str, Any]:
    """Summarize the whole test in periods of equal length.

    Latencies belong to when a request was due, throughput to when tokens came out.
    """
    width = _width(seconds)
    bins = max(1, math.ceil(seconds / width))
    due: list[list[Record]] = [[] for _ in range(bins)]
    tokens, under_way = [0.0] * bins, [0.0] * bins
    for record in records:
        due[min(bins - 1, max(0, int(record.planned / width)))].append(record)
        first = min(bins - 1, max(0, int(record.sent / width)))
        last = min(bins - 1, max(first, int(record.ended / width)))
        length = max(1e-9, record.ended - record.sent)
        for i in range(first, last + 1):
            share = overlap(i * width, (i + 1) * width, record.sent, record.ended)
            under_way[i] += share * length / width
            tokens[i] += share * record.tokens / width
    spreads = {m: [Spread.of(times(records, m)) for records in due] for m in METRICS}
    counts: dict[str, list[int]] = {
        o: [sum(r.outcome == o for r in records) for records in due] for o in OUTCOMES
    }
    return {
        "width_s": width,
        "begin_s": [i * width for i in range(bins)],
        "sent": [len(records) for records in due],
        **counts,
        "tokens_per_s": tokens,
        "under_way": under_way,
        **{
            f"{m}_{p}_ms": [getattr(s, p) for s in spread]
            for m, spread in spreads.items()
            for p in ("p50", "p99")
        },
    }


def _width(seconds: float) -> float:
    """A round length, of which at most `MAX_BINS` cover a test."""
    for width in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0):
        if seconds / width <= MAX_BINS:
            return width
    return 600.0 * math.ceil(seconds / 600.0 / MAX_BINS)
