"""The parts of a round's time, from the spans that the three services record (`--traces-file`).

What was drafted before a round began is no part of it. All clocks are one machine's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flyspec.tables import FittedTable, make_table
from flyspec_lab.statistics import grouped

PARTS = ("draft model", "target model", "judging", "messages", "waiting for a model", "other")
"""Waiting: for another session's step; other: the services and the orchestrator."""


class TracedSpan(NamedTuple):
    """A span as a service wrote it; times in ms since 1970."""

    name: str
    trace: str
    id: str
    parent: str
    begin: float
    end: float
    attributes: Mapping[str, Any]

    def within(self, begin: float, end: float) -> float:
        """Return the ms of it between two times."""
        return max(0.0, min(self.end, end) - max(self.begin, begin))

    def ms(self, name: str) -> float:
        """Return a duration among its attributes."""
        return 1e3 * float(self.attributes.get(f"flyspec.{name}_s", 0))


def read_spans(files: Iterable[Path]) -> list[TracedSpan]:
    """Read the spans of several services."""
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [
        TracedSpan(
            r["name"],
            r["context"]["trace_id"],
            r["context"]["span_id"],
            r["parent_id"] or "",
            _ms(r["start_time"]),
            _ms(r["end_time"]),
            r["attributes"],
        )
        for r in records
    ]


def _ms(time: str) -> float:
    return 1e3 * datetime.fromisoformat(time).timestamp()


class TimedRound(NamedTuple):
    """A round with drafts: its duration, and that of each of `PARTS`, which add up to it, in ms."""

    num_drafts: int
    ms: float
    parts: Sequence[float]


def timed_rounds(spans: Sequence[TracedSpan]) -> list[TimedRound]:
    """Return the rounds with drafts, except each request's first, which reads the prompt."""
    below = grouped(spans, lambda span: span.parent)
    every = sorted(
        (s for s in spans if s.name == "round" and not s.attributes.get("flyspec.abandoned")),
        key=lambda span: span.begin,
    )
    return [
        _timed(before.end, own, below)
        for of in grouped(every, lambda span: span.trace).values()
        for before, own in pairwise(of)
        if own.attributes.get("flyspec.num_draft_tokens")
    ]


def _timed(before: float, own: TracedSpan, below: Mapping[str, Sequence[TracedSpan]]) -> TimedRound:
    begin = max(before, own.begin)
    calls = [*below.get(own.id, ())]
    drafting, drafted = _service(calls, "draft", begin, own.end, below)
    verifying, verified = _service(calls, "verify", begin, own.end, below)
    # A service may have begun before the round did.
    model = min(sum(s.ms("model") for s in drafted), drafting.inside)
    forward = min(sum(s.ms("forward") for s in verified), verifying.inside)
    judge = min(sum(s.ms("judge") for s in verified), verifying.inside - forward)
    queued = min(sum(s.ms("queue") for s in drafted), drafting.inside - model)
    queued += min(sum(s.ms("queue") for s in verified), verifying.inside - forward - judge)
    messages = drafting.messages + verifying.messages
    known = [model, forward, judge, messages, queued]
    whole = own.end - begin
    drafts = own.attributes["flyspec.num_draft_tokens"]
    return TimedRound(drafts, whole, [*known, max(0.0, whole - sum(known))])


class _Wait(NamedTuple):
    """A round's wait for a service, in ms: while that worked, and the rest."""

    inside: float
    messages: float


def _service(
    calls: Sequence[TracedSpan],
    name: str,
    begin: float,
    end: float,
    below: Mapping[str, Sequence[TracedSpan]],
) -> tuple[_Wait, list[TracedSpan]]:
    """Return the wait for a service between two times, and the service's own spans."""
    waits = [call for call in calls if call.name == name]
    served = [span for wait in waits for span in below.get(wait.id, ())]
    whole = sum(wait.within(begin, end) for wait in waits)
    last = max((wait.end for wait in waits), default=end)
    inside = min(whole, sum(span.within(begin, min(last, end)) for span in served))
    return _Wait(inside, whole - inside), served


def parts_table(rounds: Sequence[TimedRound], title: str) -> FittedTable:
    """Return the table of `summary`."""
    rows = [
        (name, f"{part['median_ms']:.2f}", f"{part['p90_ms']:.2f}", f"{part['share']:.1%}")
        for name, part in summary(rounds).items()
    ]
    return make_table(["part of a round", "median, ms", "p90, ms", "share"], rows, title)


def summary(rounds: Sequence[TimedRound]) -> dict[str, dict[str, float]]:
    """Return median and p90 over the rounds, and the share of all their time, by part."""
    whole = sum(r.ms for r in rounds)
    durations = {name: [r.parts[i] for r in rounds] for i, name in enumerate(PARTS)}
    return {
        name: {
            "median_ms": float(np.median(ms)),
            "p90_ms": float(np.percentile(ms, 90)),
            "share": sum(ms) / whole,
        }
        for name, ms in {**durations, "round": [r.ms for r in rounds]}.items()
    }
