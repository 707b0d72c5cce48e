"""Metrics, trace and log line for one request.

A generation reports four events: admitted, round, recovered, completed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AbstractContextManager
from typing import Any

from flyspec.errors import FlyspecError
from flyspec.telemetry import Telemetry, fields, new_request_id
from flyspec.telemetry.traces import Attributes, Traces
from flyspec.values.generation import Recovery
from orchestrator.admission.clients import Caller
from orchestrator.generation.ledger import Ledger, RoundOutcome
from orchestrator.generation.output import Output, Update
from orchestrator.generation.plan import GenerationPlan
from orchestrator.telemetry.metrics import GenerationMetrics, RoundCounter
from orchestrator.telemetry.tracing import GenerationTrace
from orchestrator.upstreams.protocol import Correlation

log = logging.getLogger(__name__)

TRACED = (
    "num_rounds",
    "num_spec_steps",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "num_loose_tokens",
    "loose_cost_nats",
    "num_rollbacks",
)
"""Fields of `SpeculationMetrics` recorded in a request's span."""


class RequestObserver:
    """Observes all requests of an orchestrator."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._traces = telemetry.traces
        self.metrics = GenerationMetrics(telemetry.registry)
        telemetry.collect(self.metrics.collect)

    def request(self, caller: Caller) -> Observation:
        """Return a context that spans a request; generates a request ID if the caller sent none."""
        return Observation(self.metrics, self._traces, caller)


class Observation(AbstractContextManager["Observation"]):
    """Records metrics, trace and log line of one request."""

    def __init__(self, metrics: GenerationMetrics, traces: Traces, caller: Caller) -> None:
        self.request_id = request_id = caller.request_id or new_request_id()
        self._metrics = metrics
        self._arrived_ns = time.perf_counter_ns()
        span = traces.begin(caller.traceparent, self._arrived_ns)
        self._trace = GenerationTrace(traces, span, request_id) if span is not None else None
        self._finish_reason = ""
        self._name = "request"
        self._facts: dict[str, Any] = {"client": caller.shown}
        if self._trace is not None:
            self._trace.describe({"enduser.id": caller.shown})
        self._counter: RoundCounter | None = None
        self._key = caller.key.name if caller.key else ""
        self._num_output_tokens = 0

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, FlyspecError):
            self._facts["reason"] = str(error)
        self._end("OK" if error is None else _status_of(error))

    @property
    def correlation(self) -> Correlation:
        """Request ID and trace context for messages to the services."""
        return self._trace or Correlation(self.request_id)

    def admitted(
        self, plan: GenerationPlan, ledger: Ledger, model: str, drafter: str, is_chat: bool
    ) -> None:
        """Record that the request was admitted; `drafter` is the one assigned to it."""
        now = time.perf_counter_ns()
        metrics = self._metrics
        metrics.queue_seconds.observe((now - self._arrived_ns) / 1e9)
        metrics.prompt_tokens.inc(len(plan.prompt_token_ids))
        rule, drafts = plan.judging.main_rule.name, plan.drafts.num_speculative_tokens
        self._labels = metrics.label(drafter if drafts else ""), rule
        self._counter = RoundCounter(metrics, rule, ledger)
        operation = "chat" if is_chat else "text_completion"
        self._name = f"{operation} {model}"
        self._facts.update(
            rule=plan.judging.names, drafter=drafter, prompt_tokens=len(plan.prompt_token_ids)
        )
        if self._trace is not None:
            self._trace.admitted(self._arrived_ns, now)
            self._trace.describe(_of_plan(plan, operation, model, drafter))

    def round(self, round_: RoundOutcome, update: Update) -> None:
        assert self._counter is not None
        self._counter.count(round_, update.final)
        self._num_output_tokens += len(update.final)
        if self._trace is not None:
            self._trace.round(round_, len(update.final))

    def recovered(self, recovery: Recovery) -> None:
        kind = recovery.kind.name.lower()
        self._metrics.recoveries.labels(kind).inc()
        self._metrics.recovery_seconds.labels(kind).observe(recovery.delay_ns / 1e9)
        if self._trace is not None:
            self._trace.event(
                "recovery",
                {
                    "flyspec.recovery.kind": kind,
                    "flyspec.recovery.delay_s": recovery.delay_ns / 1e9,
                    "flyspec.recovery.successor": recovery.successor,
                    "flyspec.recovery.reason": recovery.reason,
                },
            )

    def completed(self, output: Output, ledger: Ledger) -> None:
        assert self._counter is not None
        assert output.finish_reason is not None
        self._counter.finish()
        self._finish_reason = output.finish_reason.name.lower()
        metrics, labels, timings = self._metrics, self._labels, ledger.timings
        total_s, first_s = timings.total_ns / 1e9, timings.time_to_first_token_ns / 1e9
        metrics.first_token_seconds.labels(*labels).observe(first_s)
        metrics.request_seconds.labels(*labels).observe(total_s)
        following = output.num_final_tokens - 1
        if following > 0:
            metrics.token_seconds.labels(*labels).observe((total_s - first_s) / following)
        self._facts.update(
            finish_reason=self._finish_reason,
            output_tokens=output.num_final_tokens,
            rounds=ledger.metrics.num_rounds,
            accepted=ledger.metrics.num_accepted_draft_tokens,
            loose=ledger.metrics.num_loose_tokens,
            first_token_ms=round(1e3 * first_s, 1),
        )
        if self._trace is not None:
            self._trace.describe(
                {
                    "gen_ai.response.finish_reasons": [self._finish_reason],
                    "gen_ai.usage.output_tokens": output.num_final_tokens,
                    "flyspec.queue_s": timings.queue_ns / 1e9,
                    "flyspec.time_to_first_token_s": first_s,
                    **{f"flyspec.{name}": getattr(ledger.metrics, name) for name in TRACED},
                }
            )

    def _end(self, status: str) -> None:
        ended_ns = time.perf_counter_ns()
        if status == "CANCELLED" and self._finish_reason:
            status = "OK"  # the client disconnected after receiving the completion
        self._metrics.requests.labels(status, self._finish_reason).inc()
        if self._key:
            self._metrics.count_key(self._key, status, self._num_output_tokens)
        if self._trace is not None:
            error = "" if status == "OK" else status
            self._trace.end(self._name, ended_ns, error)
        total_ms = round((ended_ns - self._arrived_ns) / 1e6, 1)
        ran = status == "OK" or self._counter is not None  # else it is one of `errors_returned`
        log.log(
            logging.INFO if ran else logging.DEBUG,
            "request ended",
            extra=fields(status=status, **self._facts, total_ms=total_ms),
        )


def _status_of(error: BaseException) -> str:
    """Return the name of the gRPC status for a request that failed with `error`."""
    if isinstance(error, FlyspecError):
        return error.status
    # The client disconnected, or the server is stopping.
    return "CANCELLED" if isinstance(error, asyncio.CancelledError | GeneratorExit) else "INTERNAL"


def _of_plan(plan: GenerationPlan, operation: str, model: str, drafter: str) -> Attributes:
    """Return a span's attributes known at admission, named as in OpenTelemetry where possible."""
    sampling = plan.sampling
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "flyspec",
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": plan.limits.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.stream": True,
        "gen_ai.response.model": model,
        "gen_ai.usage.input_tokens": len(plan.prompt_token_ids),
        "flyspec.rule": plan.judging.names,
        "flyspec.drafter": drafter,
        "flyspec.num_speculative_tokens": plan.drafts.num_speculative_tokens,
    }
