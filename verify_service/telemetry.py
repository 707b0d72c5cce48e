"""Metrics of the verify service's rounds, and a span for each traced round."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from prometheus_client.core import CounterMetricFamily, Metric

from flyspec.telemetry import Telemetry
from flyspec.telemetry.logs import session_line
from flyspec.telemetry.metrics import (
    EngineMetrics,
    cache_metrics,
    gauge,
    session_metrics,
    step_histogram,
)
from flyspec.values.phases import rule_names
from flyspec.values.rounds import Verdict, VerifyRound
from verify_service.engine import VerifyEngine
from verify_service.sessions import TargetSession

log = logging.getLogger(__name__)


class VerifyTelemetry:
    """Telemetry of a verify service's rounds. `engine_metrics` are for its engine."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        registry = telemetry.registry
        self.engine_metrics = EngineMetrics(registry, "verify")
        self._queue_seconds = step_histogram(
            registry,
            "flyspec_verify_queue_seconds",
            "Seconds from a round's arrival to its first step.",
        )
        self._forward_seconds = step_histogram(
            registry,
            "flyspec_verify_forward_seconds",
            "Seconds from a round's first step to the end of its last one.",
        )
        self._judge_seconds = step_histogram(
            registry,
            "flyspec_verify_judge_seconds",
            "Seconds spent on the rule and on sampling, per verdict.",
            "rule",
        )
        self._head_seconds = step_histogram(
            registry,
            "flyspec_verify_head_seconds",
            "Seconds that a head took to read a step and draft, per verdict.",
            "head",
        )

    def watch(self, engine: VerifyEngine) -> None:
        self.engine_metrics.watch(lambda: engine.failures.num_total, lambda: engine.step_running_ns)

        def collect() -> Iterator[Metric]:
            yield from session_metrics("verify", engine.sessions)
            cache = engine.model.cache
            yield from cache_metrics("verify", cache.usage, cache.preemptions)
            yield gauge(
                "flyspec_verify_sessions_waiting",
                "Sessions waiting for a slot.",
                engine.sessions.waiting,
            )
            yield gauge("flyspec_verify_queue_rounds", "Rounds not answered yet.", engine.waiting)
            failures = CounterMetricFamily(
                "flyspec_verify_head_failures",
                "Rounds without a proposal because the head failed.",
                labels=["head"],
            )
            for name, count in engine.heads.failures.items():
                failures.add_metric([name], count)
            yield failures

        self._telemetry.collect(collect)

    def session(self, session: TargetSession) -> AbstractContextManager[None]:
        return session_line(
            log, lambda: {"rule": rule_names(session.rules), "tokens": len(session.sequence)}
        )

    @contextmanager
    def round(self, session: TargetSession, round_: VerifyRound) -> Iterator[list[Verdict]]:
        """Observe a round from its arrival to its last verdict; the caller fills the list."""
        began_ns = time.perf_counter_ns()
        verdicts: list[Verdict] = []
        error = ""
        try:
            yield verdicts
        except BaseException as failure:
            error = type(failure).__name__
            raise
        finally:
            rule = session.rule_of(round_).name
            self._count(rule, round_, verdicts)
            if round_.traceparent:
                self._trace(rule, round_, verdicts, began_ns, error)

    def _count(self, rule: str, round_: VerifyRound, verdicts: list[Verdict]) -> None:
        judging = self._judge_seconds.labels(rule)
        for verdict in verdicts:
            timings = verdict.timings
            self._queue_seconds.observe(timings.queue_ns / 1e9)
            self._forward_seconds.observe(timings.forward_ns / 1e9)
            judging.observe(timings.judge_ns / 1e9)
            if round_.head and timings.head_ns:
                self._head_seconds.labels(round_.head.name).observe(timings.head_ns / 1e9)

    def _trace(
        self,
        rule: str,
        round_: VerifyRound,
        verdicts: list[Verdict],
        began_ns: int,
        error: str,
    ) -> None:
        timings = [verdict.timings for verdict in verdicts]
        attributes: dict[str, str | int | float] = {
            "flyspec.round_id": round_.round_id,
            "flyspec.rule": rule,
            "flyspec.num_draft_tokens": len(round_.draft_token_ids),
            "flyspec.num_verdicts": len(verdicts),
            "flyspec.queue_s": sum(t.queue_ns for t in timings) / 1e9,
            "flyspec.forward_s": sum(t.forward_ns for t in timings) / 1e9,
            "flyspec.judge_s": sum(t.judge_ns for t in timings) / 1e9,
        }
        if round_.head:
            attributes["flyspec.head"] = round_.head.name
            attributes["flyspec.head_s"] = sum(t.head_ns for t in timings) / 1e9
        if error:
            attributes["error.type"] = error
        ended_ns = time.perf_counter_ns()
        self._telemetry.traces.add(
            "check", "SERVER", round_.traceparent, began_ns, ended_ns, attributes
        )
