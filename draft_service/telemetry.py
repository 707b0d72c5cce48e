"""Metrics of the draft service's proposals, and a span for each traced proposal."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

from prometheus_client import Counter
from prometheus_client.core import Metric

from draft_service.sessions import ClientSession, Sessions
from flyspec.telemetry import Telemetry
from flyspec.telemetry.logs import session_line
from flyspec.telemetry.metrics import (
    EngineMetrics,
    cache_metrics,
    session_metrics,
    step_histogram,
)
from flyspec.values.rounds import DraftAdvance, DraftChunk

log = logging.getLogger(__name__)


class DraftTelemetry:
    """Telemetry of a draft service's proposals. `engine_metrics` are for its engine."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        registry = telemetry.registry
        self.engine_metrics = EngineMetrics(registry, "draft")
        self._queue_seconds = step_histogram(
            registry,
            "flyspec_draft_queue_seconds",
            "Seconds from a proposal's request to its first step.",
            "drafter",
        )
        self._proposal_seconds = step_histogram(
            registry,
            "flyspec_draft_proposal_seconds",
            "Seconds from a proposal's request to its last token.",
            "drafter",
        )
        self._tokens = Counter(
            "flyspec_draft_tokens", "Tokens proposed.", ["drafter"], registry=registry
        )

    def watch(self, sessions: Sessions) -> None:
        def collect() -> Iterator[Metric]:
            yield from session_metrics("draft", sessions.describe().sessions)
            if cache := sessions.cache:
                yield from cache_metrics("draft", cache.usage, cache.preemptions)

        self._telemetry.collect(collect)

    def session(self, session: ClientSession) -> AbstractContextManager[None]:
        return session_line(log, lambda: {"drafter": session.drafter.info.name})

    def proposed(
        self,
        session: ClientSession,
        advance: DraftAdvance,
        began_ns: int,
        last: DraftChunk,
        service_ns: int,
    ) -> None:
        """Record a proposal that was sent; `last` is its last chunk, ready after `service_ns`."""
        name, timings = session.drafter.info.name, last.timings
        num_tokens = last.start_position + len(last.token_ids) - last.keep_length - 1
        self._queue_seconds.labels(name).observe(timings.queue_ns / 1e9)
        self._proposal_seconds.labels(name).observe(timings.service_ns / 1e9)
        self._tokens.labels(name).inc(num_tokens)
        if advance.traceparent:
            self._telemetry.traces.add(
                "propose",
                "SERVER",
                advance.traceparent,
                began_ns,
                time.perf_counter_ns(),
                {
                    "flyspec.round_id": advance.round_id,
                    "flyspec.drafter": name,
                    "flyspec.num_draft_tokens": num_tokens,
                    "flyspec.queue_s": timings.queue_ns / 1e9,
                    "flyspec.model_s": timings.model_ns / 1e9,
                    "flyspec.service_s": service_ns / 1e9,
                },
            )
