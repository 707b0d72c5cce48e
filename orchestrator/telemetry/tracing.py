"""The trace of one generation: a span for the request, one per round, and one per part of a round.

    chat MODEL                        the request, from arrival to end
      queue                           until admitted
      round                           one per round
        draft                         until the proposal arrived
          propose                     recorded by the draft service
        verify                        until the verdict arrived
          check                       recorded by the verify service

Traces contain neither token IDs nor the text of prompts or outputs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from flyspec.metadata import TRACEPARENT_KEY
from flyspec.telemetry.traces import Attributes, Traces, traceparent_of, wall_ns
from flyspec.values.rounds import Outcome
from orchestrator.generation.ledger import RoundOutcome
from orchestrator.generation.window import RollBack
from orchestrator.upstreams.protocol import Correlation, Part

if TYPE_CHECKING:
    from opentelemetry.trace import Span

K = TypeVar("K", int, str)


@dataclass(slots=True)
class _Pending:
    """A span that will be recorded when it ends: its ID and start time.

    For a round, also its requested `parts` by name, and `num_verdicts` and `num_tokens` so far.
    """

    span_id: int
    began_ns: int
    ended_ns: int = 0
    parts: dict[str, _Pending] = field(default_factory=dict)
    num_verdicts: int = 0
    num_tokens: int = 0


class GenerationTrace(Correlation):
    """The trace of a request; `span` is the request's own span, ended by `end`."""

    def __init__(self, traces: Traces, span: Span, request_id: str) -> None:
        super().__init__(request_id)
        self._traces, self._span = traces, span
        self._trace_id = span.get_span_context().trace_id
        self._parent = traceparent_of(self._trace_id, span.get_span_context().span_id)
        self.metadata = (*self.metadata, (TRACEPARENT_KEY, self._parent))
        self._rounds: dict[int, _Pending] = {}
        span.set_attribute("flyspec.request_id", request_id)
        span.set_attribute("gen_ai.response.id", request_id)

    @property
    def traceparent(self) -> str:
        return self._parent

    def waits_for(self, part: Part, round_id: int) -> str:
        """Choose the ID of the part's span, which is recorded when it ends."""
        now = time.perf_counter_ns()
        round_ = self._pending(self._rounds, round_id, now)
        return traceparent_of(self._trace_id, self._pending(round_.parts, part, now).span_id)

    def _pending(self, spans: dict[K, _Pending], key: K, began_ns: int) -> _Pending:
        """Return the span for `key`, starting one if there is none."""
        if key not in spans:
            spans[key] = _Pending(self._traces.new_span_id(), began_ns)
        return spans[key]

    def admitted(self, arrived_ns: int, admitted_ns: int) -> None:
        self._traces.add("queue", "INTERNAL", self._parent, arrived_ns, admitted_ns, {})

    def round(self, round_: RoundOutcome, num_final: int) -> None:
        """Record the end of a round, or of one verdict of plain decoding."""
        ended_ns = round_.began_ns + round_.round_ns
        open_ = self._pending(self._rounds, round_.round_id, round_.began_ns)
        open_.num_verdicts += round_.verdict is not None
        open_.num_tokens += num_final
        if round_.verdict is not None and not round_.verdict.last:
            return
        del self._rounds[round_.round_id]
        if wait := open_.parts.get("draft"):
            wait.ended_ns = round_.proposal.arrived_ns
        self._add_round(open_, ended_ns, _attributes(round_, open_))
        for stale in [r for r in self._rounds if r < round_.round_id]:
            self._abandon(stale, ended_ns)

    def event(self, name: str, attributes: Attributes) -> None:
        self._span.add_event(name, attributes)

    def describe(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def end(self, name: str, ended_ns: int, error: str = "") -> None:
        """End the request's span. `error` is the name of its gRPC status, empty if OK."""
        for round_id in list(self._rounds):
            self._abandon(round_id, ended_ns)
        self._span.update_name(name)
        if error:
            from opentelemetry.trace import StatusCode

            self._span.set_attribute("error.type", error)
            self._span.set_status(StatusCode.ERROR, error)
        self._span.end(wall_ns(ended_ns))

    def _abandon(self, round_id: int, ended_ns: int) -> None:
        """Record a round that was started but is no longer needed."""
        open_ = self._rounds.pop(round_id)
        attributes = {"flyspec.round_id": round_id, "flyspec.abandoned": True}
        self._add_round(open_, ended_ns, attributes)

    def _add_round(self, open_: _Pending, ended_ns: int, attributes: Attributes) -> None:
        add, round_id = self._traces.add, {"flyspec.round_id": attributes["flyspec.round_id"]}
        times = open_.began_ns, ended_ns
        parent = add("round", "INTERNAL", self._parent, *times, attributes, open_.span_id)
        for name, wait in open_.parts.items():
            times = wait.began_ns, wait.ended_ns or ended_ns
            add(name, "CLIENT", parent, *times, round_id, wait.span_id)


def _attributes(round_: RoundOutcome, open_: _Pending) -> Attributes:
    verdict = round_.verdict
    decisions = verdict.decisions if verdict is not None else ()
    return {
        "flyspec.round_id": round_.round_id,
        "flyspec.drafter": round_.proposal.drafter,
        "flyspec.start_length": round_.start,
        "flyspec.num_draft_tokens": len(decisions),
        "flyspec.num_accepted_draft_tokens": sum(d.outcome.accepted for d in decisions),
        "flyspec.num_loose_tokens": sum(
            d.outcome in (Outcome.LOOSE, Outcome.PROVISIONAL) for d in decisions
        ),
        "flyspec.num_verdicts": open_.num_verdicts,
        "flyspec.num_final_tokens": open_.num_tokens,
        "flyspec.rolled_back": any(isinstance(c, RollBack) for c in round_.commands),
    }
