"""The time line of a round, from the spans of all three processes: who worked, who waited.

A round is cut where work passes from one to another. Of the orchestrator, the spans tell when it
asked and when it had the answer; of the services, when a request arrived, when it was answered, how
long it waited for the model and how long the model ran. All clocks are one machine's.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

ORCHESTRATOR, WIRE, DRAFT, VERIFY = "orchestrator", "on the way", "draft", "verify"


class Part(NamedTuple):
    """A part of a round: who has it, and what happens."""

    name: str
    where: str
    what: str


PARTS = (
    Part("ask", ORCHESTRATOR, "what to draft"),
    Part("to_draft", WIRE, "request, read by the draft service"),
    Part("draft_queue", DRAFT, "until the model begins"),
    Part("draft_model", DRAFT, "in the draft model"),
    Part("draft_rest", DRAFT, "around its steps; to the event loop"),
    Part("from_draft", WIRE, "proposal, read by the orchestrator"),
    Part("check", ORCHESTRATOR, "what to check"),
    Part("to_verify", WIRE, "request, read by the verify service"),
    Part("verify_queue", VERIFY, "until the model begins"),
    Part("forward", VERIFY, "in the target"),
    Part("judge", VERIFY, "sampling and the rule"),
    Part("from_verify", WIRE, "verdict, read, and the window moved"),
)
_ABANDONED = "flyspec.abandoned"
_MODELS = ("draft_model", "forward")
_LOOP = ("draft_queue", "draft_rest")


@dataclass(frozen=True)
class TracedSpan:
    """A span as a service wrote it; times in ns since 1970, cut to microseconds."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class RoundLine:
    """One round: ns of each of `PARTS`, which make up the whole."""

    trace_id: str
    num_draft_tokens: int
    parts_ns: tuple[int, ...]

    def of(self, *names: str) -> int:
        """Time of these parts together, ns."""
        return sum(ns for part, ns in zip(PARTS, self.parts_ns, strict=True) if part.name in names)

    @property
    def total_ns(self) -> int:
        """The whole round."""
        return sum(self.parts_ns)

    @property
    def hops_ns(self) -> int:
        """What is outside the models, judging apart."""
        return self.total_ns - self.of(*_MODELS, "judge")


@dataclass(frozen=True)
class TimelineReport:
    """Medians over `rounds`, in ms. `parts` are by name, in order.

    `hops` is a round outside both models and the rule, in generations without a trace, which costs
    some itself (`traced_hops`); `echoes` what two bare gRPC round trips of as many bytes take
    outside work of equal length, `exchanges` the same of flyspec's messages, with threads, values
    and time limits and nothing decided; `proposal_loop` the draft service's time outside its model.
    `text` is from a round's end until the client has its tokens, beside the next round.
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

    def to_document(self, **facts: Any) -> dict[str, Any]:
        """As JSON."""
        return {**facts, **asdict(self)}


def read_spans(files: Iterable[Path]) -> list[TracedSpan]:
    """What services wrote with `--traces-file`."""
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
    """The rounds with drafts of these traces, but for each one's first, which reads the prompt.

    A round begins where the one before ended; what was drafted ahead by then has taken no time of
    it. Rounds of several proposals or verdicts, or without a span of a service, are left out.
    """
    wanted = set(trace_ids)
    below: dict[str, list[TracedSpan]] = defaultdict(list)
    for span in spans:
        below[span.parent_id].append(span)
    rounds: dict[str, list[TracedSpan]] = defaultdict(list)
    for span in spans:
        if span.name == "round" and span.trace_id in wanted and not span.attributes.get(_ABANDONED):
            rounds[span.trace_id].append(span)
    lines = []
    for of_trace in rounds.values():
        of_trace.sort(key=lambda span: span.begin_ns)
        for before, span in pairwise(of_trace):
            line = _line(span, before.end_ns, below)
            lines += [line] if line is not None else []
    return lines


def round_ends(spans: Sequence[TracedSpan], trace_id: str) -> list[int]:
    """When the rounds of a trace that made final tokens ended, in order."""
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
    """The typical round. `overheads_ns` are of rounds without a trace: outside the models.

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
    """A round's parts, if it has one of everything."""
    draft = _only(below[span.span_id], "draft")
    verify = _only(below[span.span_id], "verify")
    if draft is None or verify is None or not span.attributes.get("flyspec.num_draft_tokens"):
        return None
    proposed = _only(below[draft.span_id], "propose")
    checked = _only(below[verify.span_id], "check")
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
    # Clocks are read a moment apart: a part that would end before it begins has no time, and the
    # sum stays the round's.
    ends = accumulate((min(stamp, span.end_ns) for stamp in stamps), max, initial=begin_ns)
    parts = tuple(end - begin for begin, end in pairwise(ends))
    return RoundLine(span.trace_id, span.attributes["flyspec.num_draft_tokens"], parts)


def _answered_ns(span: TracedSpan) -> int:
    """When a proposal was ready to be written, or else when its span ended."""
    service_ns = _seconds(span, "service_s")
    return span.begin_ns + service_ns if service_ns else span.end_ns


def _only(spans: Sequence[TracedSpan], name: str) -> TracedSpan | None:
    found = [span for span in spans if span.name == name]
    return found[0] if len(found) == 1 else None


def _seconds(span: TracedSpan, name: str) -> int:
    return round(float(span.attributes.get(f"flyspec.{name}", 0.0)) * 1e9)


def _ns(text: str) -> int:
    """Nanoseconds since 1970 of an ISO time in UTC; a float would lose some."""
    moment = datetime.fromisoformat(text)
    return int(moment.replace(microsecond=0).timestamp()) * 10**9 + moment.microsecond * 1000


def _ms(values: Iterable[int]) -> float:
    return statistics.median(values) / 1e6
