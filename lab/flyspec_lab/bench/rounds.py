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
    model, waiting, to_drafter = _service("draft", ("model", "queue"), begin, own, below)
    verify = _service("verify", ("forward", "judge", "queue"), begin, own, below)
    forward, judge, queued, to_target = verify
    known = [model, forward, judge, to_drafter + to_target, waiting + queued]
    whole = own.end - begin
    drafts = own.attributes["flyspec.num_draft_tokens"]
    return TimedRound(drafts, whole, [*known, max(0.0, whole - sum(known))])


def _service(
    name: str,
    parts: Iterable[str],
    begin: float,
    own: TracedSpan,
    below: Mapping[str, Sequence[TracedSpan]],
) -> list[float]:
    """Return the ms of each part of a service's work on a round, and of the messages."""
    waits = [call for call in below.get(own.id, ()) if call.name == name]
    served = [span for wait in waits for span in below.get(wait.id, ())]
    whole = sum(wait.within(begin, own.end) for wait in waits)
    end = min(own.end, max((wait.end for wait in waits), default=own.end))
    inside = left = min(whole, sum(span.within(begin, end) for span in served))
    found = []
    for part in parts:  # the service may have begun before the round did
        found.append(min(left, sum(span.ms(part) for span in served)))
        left -= found[-1]
    return [*found, whole - inside]


def parts_table(parts: Mapping[str, Mapping[str, float]], title: str) -> FittedTable:
    """Return the table of a `summary`."""
    rows = [
        (name, f"{part['median_ms']:.2f}", f"{part['p90_ms']:.2f}", f"{part['share']:.1%}")
        for name, part in parts.items()
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
