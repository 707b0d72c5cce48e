"""The timeline of a round, from the spans of all three processes.

A round is cut where work passes from one process to another. The orchestrator's spans tell when it
asked and when it had the answer; those of the services when a request arrived, when it was
answered, how long it waited for the model and how long the model ran. All clocks are one machine's.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from flyspec_lab.bench.summaries import grouped

ORCHESTRATOR, WIRE, DRAFT, VERIFY = "orchestrator", "in transit", "draft", "verify"


class Part(NamedTuple):
    """A part of a round: the process it belongs to, and what happens."""

    name: str
    where: str
    what: str


PARTS = (
    Part("ask", ORCHESTRATOR, "decide what to draft"),
    Part("to_draft", WIRE, "request, read by the draft service"),
    Part("draft_queue", DRAFT, "wait for the model"),
    Part("draft_model", DRAFT, "draft model"),
    Part("draft_rest", DRAFT, "between its steps; back to the event loop"),
    Part("from_draft", WIRE, "proposal, read by the orchestrator"),
    Part("check", ORCHESTRATOR, "decide what to verify"),
    Part("to_verify", WIRE, "request, read by the verify service"),
    Part("verify_queue", VERIFY, "wait for the model"),
    Part("forward", VERIFY, "target model"),
    Part("judge", VERIFY, "sampling and the rule"),
    Part("from_verify", WIRE, "verdict, read; window updated"),
)
_ABANDONED = "flyspec.abandoned"
_MODELS = ("draft_model", "forward")
_LOOP = ("draft_queue", "draft_rest")


@dataclass(frozen=True)
class TracedSpan:
    """A span written by a service; times in ns since 1970, truncated to microseconds."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class RoundLine:
    """One round: the ns of each of `PARTS`, which add up to the whole."""

    trace_id: str
    num_draft_tokens: int
    parts_ns: tuple[int, ...]

    def of(self, *names: str) -> int:
        """Return the total of these parts, in ns."""
        return sum(ns for part, ns in zip(PARTS, self.parts_ns, strict=True) if part.name in names)

    @property
    def total_ns(self) -> int:
        return sum(self.parts_ns)

    @property
    def hops_ns(self) -> int:
        """Time outside the models and judging."""
        return self.total_ns - self.of(*_MODELS, "judge")


@dataclass(frozen=True)
class TimelineReport:
    """Medians over `rounds`, in ms. `parts` are by name, in order.

    `hops`: the time of a round outside both models and the rule, in generations without a trace
    (`traced_hops`: with one, which takes time itself). `echoes`: two bare gRPC round trips of as
    many bytes, outside work of equal length; `exchanges`: the same with flyspec's messages,
    threads, values and time limits, but nothing decided. `proposal_loop`: the draft service's time
    outside its model. `text`: from a round's end until the client has its tokens, during the next
    round.
    """

    rounds: int
    num_draft_tokens: float
    round_ms: float
    parts: Mapping[str, float]
    hops_ms: float
    traced_hops_ms: float
    echoes_ms: float
    hops_over_echoes: float
    exchanges_ms: float
    exchanges_over_echoes: float
    proposal_loop_ms: float
    text_ms: float | None = None


def read_spans(files: Iterable[Path]) -> list[TracedSpan]:
    """Read what services wrote with `--traces-file`."""
    spans = []
    for file in files:
        for line in file.read_text().splitlines():
            record = json.loads(line)
            spans.append(
                TracedSpan(
                    record["name"],
                    record["context"]["trace_id"].removeprefix("0x"),
                    record["context"]["span_id"],
                    record["parent_id"] or "",
                    _ns(record["start_time"]),
                    _ns(record["end_time"]),
                    record["attributes"],
                )
            )
    return spans


def round_lines(spans: Sequence[TracedSpan], trace_ids: Iterable[str]) -> list[RoundLine]:
    """Return the rounds with drafts of these traces, except each one's first, with the prefill.

    A round begins where the previous one ended; what was drafted ahead by then takes none of its
    time. Rounds with several proposals or verdicts, or without a service's span, are left out.
    """
    wanted = set(trace_ids)
    below = grouped(spans, lambda span: span.parent_id)
    rounds = sorted(
        (s for s in spans
         if s.name == "round" and s.trace_id in wanted and not s.attributes.get(_ABANDONED)),
        key=lambda span: span.begin_ns,
    )  # fmt: skip
    lines = (
        _line(span, before.end_ns, below)
        for of_trace in grouped(rounds, lambda span: span.trace_id).values()
        for before, span in pairwise(of_trace)
    )
    return [line for line in lines if line is not None]


def round_ends(spans: Sequence[TracedSpan], trace_id: str) -> list[int]:
    """Return the end times of a trace's rounds that made tokens final, in order."""
    return sorted(
        span.end_ns
        for span in spans
        if span.name == "round"
        and span.trace_id == trace_id
        and span.attributes.get("flyspec.num_final_tokens")
    )


def report(
    lines: Sequence[RoundLine],
    overheads_ns: Sequence[int],
    echoes_ns: Sequence[int],
    exchanges_ns: Sequence[int],
    texts_ns: Sequence[int] = (),
) -> TimelineReport:
    """Summarize rounds; `overheads_ns` are times outside the models of rounds without a trace.

    Raises `ValueError` without rounds.
    """
    if not lines or not overheads_ns:
        raise ValueError("no round with drafts was traced")
    echoes, exchanges = _ms(echoes_ns), _ms(exchanges_ns)
    hops = _ms(overheads_ns) - _ms(line.of("judge") for line in lines)
    return TimelineReport(
        rounds=len(lines),
        num_draft_tokens=statistics.median(line.num_draft_tokens for line in lines),
        round_ms=_ms(line.total_ns for line in lines),
        parts={part.name: _ms(line.of(part.name) for line in lines) for part in PARTS},
        hops_ms=hops,
        traced_hops_ms=_ms(line.hops_ns for line in lines),
        echoes_ms=echoes,
        hops_over_echoes=hops / echoes,
        exchanges_ms=exchanges,
        exchanges_over_echoes=exchanges / echoes,
        proposal_loop_ms=_ms(line.of(*_LOOP) for line in lines),
        text_ms=_ms(texts_ns) if texts_ns else None,
    )


def _line(
    span: TracedSpan, begin_ns: int, below: Mapping[str, Sequence[TracedSpan]]
) -> RoundLine | None:
    """Return a round's parts, if it has exactly one span of each kind."""
    draft, verify = (_only(below, span, name) for name in ("draft", "verify"))
    if draft is None or verify is None or not span.attributes.get("flyspec.num_draft_tokens"):
        return None
    proposed, checked = _only(below, draft, "propose"), _only(below, verify, "check")
    if proposed is None or checked is None:
        return None
    queue, model = _seconds(proposed, "queue_s"), _seconds(proposed, "model_s")
    waited, forward, judge = (_seconds(checked, n) for n in ("queue_s", "forward_s", "judge_s"))
    stamps = [
        draft.begin_ns,
        proposed.begin_ns,
        proposed.begin_ns + queue,
        proposed.begin_ns + queue + model,
        _answered_ns(proposed),
        draft.end_ns,
        verify.begin_ns,
        checked.begin_ns,
        checked.begin_ns + waited,
        checked.begin_ns + waited + forward,
        checked.begin_ns + waited + forward + judge,
        span.end_ns,
    ]
    # Clocks are read at slightly different moments. A part that would end before it begins gets no
    # time, so that the sum is still the round's.
    ends = accumulate((min(stamp, span.end_ns) for stamp in stamps), max, initial=begin_ns)
    parts = tuple(end - begin for begin, end in pairwise(ends))
    return RoundLine(span.trace_id, span.attributes["flyspec.num_draft_tokens"], parts)


def _answered_ns(span: TracedSpan) -> int:
    """Return when a proposal was ready to be written, or else when its span ended."""
    service_ns = _seconds(span, "service_s")
    return span.begin_ns + service_ns if service_ns else span.end_ns


def _only(
    below: Mapping[str, Sequence[TracedSpan]], parent: TracedSpan, name: str
) -> TracedSpan | None:
    found = [span for span in below.get(parent.span_id, ()) if span.name == name]
    return found[0] if len(found) == 1 else None


def _seconds(span: TracedSpan, name: str) -> int:
    return round(float(span.attributes.get(f"flyspec.{name}", 0.0)) * 1e9)


def _ns(text: str) -> int:
    """Return the ns since 1970 of an ISO time in UTC, without rounding to a float."""
    moment = datetime.fromisoformat(text)
    return int(moment.replace(microsecond=0).timestamp()) * 10**9 + moment.microsecond * 1000


def _ms(values: Iterable[int]) -> float:
    return statistics.median(values) / 1e6
