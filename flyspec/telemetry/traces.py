"""OpenTelemetry traces. OpenTelemetry is imported only if spans are exported.

A session's stream spans many rounds, so round spans do not follow calls: every round message has a
`traceparent` (W3C), the parent of the service's span for the round. Spans are created when they
end, from times that are measured anyway; the ID of a span with children in other services is
chosen beforehand.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flyspec.errors import ConfigError
from flyspec.metadata import TRACEPARENT_KEY
from flyspec.spelling import install_command
from flyspec.version import __version__

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

TRACEPARENT_CHARACTERS = 55
MAX_WAITING_SPANS = 16_384
"""Maximum spans waiting to be sent; further ones are dropped, which the SDK logs."""

CLOCK_SET_NS = 1_000_000

Attributes = Mapping[str, str | bool | int | float | Sequence[str]]


class Traces:
    """Exports a service's spans to an OTLP `endpoint`, a `file` (one JSON object per line) or both.

    `sample_ratio` is the fraction of new traces to keep; a trace with a `traceparent` follows its
    sampling flag. Raises `ConfigError`.
    """

    def __init__(
        self, service: str, endpoint: str = "", file: str = "", sample_ratio: float = 1.0
    ) -> None:
        self._provider: Any = None
        if not endpoint and not file:
            return
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        self._ids = _make_ids()
        resource = {
            "service.namespace": "flyspec",
            "service.name": f"flyspec-{service}",
            "service.version": __version__,
        }
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            resource=Resource.create(resource),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        exporters: list[SpanExporter] = []
        self._out: Any = None
        if endpoint:
            exporters.append(_otlp_exporter(endpoint))
        if file:
            try:
                self._out = open(file, "a", encoding="utf-8")  # noqa: SIM115 - closed in `close`
            except OSError as error:
                raise ConfigError(
                    f"--traces-file {file}: cannot be written: {error.strerror}"
                ) from None
            exporters.append(
                ConsoleSpanExporter(
                    out=self._out, formatter=lambda span: f"{span.to_json(indent=None)}\n"
                )
            )
        for exporter in exporters:
            self._provider.add_span_processor(
                BatchSpanProcessor(exporter, max_queue_size=MAX_WAITING_SPANS)
            )
        self._tracer = self._provider.get_tracer("flyspec", __version__)

    def begin(self, traceparent: str, started_ns: int) -> Span | None:
        """Start the root span of a request; None if its trace is not sampled.

        `traceparent` is the client's, or empty; `started_ns` is from `perf_counter_ns`. The caller
        sets name and attributes before ending it.
        """
        if self._provider is None:
            return None
        from opentelemetry.trace import SpanKind

        span = self._tracer.start_span(
            "request",
            context=_context_of(traceparent),
            kind=SpanKind.SERVER,
            start_time=wall_ns(started_ns),
        )
        return span if span.is_recording() else None

    def add(
        self,
        name: str,
        kind: str,
        parent: str,
        began_ns: int,
        ended_ns: int,
        attributes: Attributes,
        span_id: int | None = None,
    ) -> str:
        """Add a span below `parent`, a traceparent, and return its own traceparent.

        Returns "" if there is no parent or its trace is not sampled. `kind` is the name of a
        SpanKind, `span_id` an ID from `new_span_id` that was already passed on.
        """
        if self._provider is None or len(parent) != TRACEPARENT_CHARACTERS:
            return ""
        from opentelemetry.trace import SpanKind

        context = _context_of(parent)
        if context is None:
            return ""
        self._ids.chosen = span_id
        span = self._tracer.start_span(
            name,
            context=context,
            kind=SpanKind[kind],
            attributes=attributes,
            start_time=wall_ns(began_ns),
        )
        self._ids.chosen = None
        span.end(wall_ns(ended_ns))
        return traceparent_of(span.get_span_context().trace_id, span.get_span_context().span_id)

    def new_span_id(self) -> int:
        """Return an ID for a span to be added later."""
        identifier: int = self._ids.generate_span_id()
        return identifier

    def close(self) -> None:
        """Send pending spans."""
        if self._provider is not None:
            self._provider.shutdown()
            if self._out is not None:
                self._out.close()


def traceparent_of(trace_id: int, span_id: int) -> str:
    """Return the W3C header of a span of a sampled trace."""
    return f"00-{trace_id:032x}-{span_id:016x}-01"


_offset_ns = 0


def wall_ns(perf_counter_ns: int) -> int:
    """Convert a time of `perf_counter_ns` to nanoseconds since 1970.

    Preserves order and distances unless the clock is set by more than `CLOCK_SET_NS`; smaller
    offsets are noise from reading the two clocks one after the other.
    """
    global _offset_ns
    offset_ns = time.time_ns() - time.perf_counter_ns()
    if abs(offset_ns - _offset_ns) > CLOCK_SET_NS:
        _offset_ns = offset_ns
    return perf_counter_ns + _offset_ns


def _context_of(traceparent: str) -> Context | None:
    """Return the context of a traceparent; None if it is empty or invalid."""
    from opentelemetry.trace import get_current_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if not traceparent:
        return None
    context = TraceContextTextMapPropagator().extract({TRACEPARENT_KEY: traceparent})
    return context if get_current_span(context).get_span_context().is_valid else None


def _make_ids() -> Any:
    """Return a generator of random IDs that uses the preselected ID for the next span, if any."""
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Ids(RandomIdGenerator):
        chosen: int | None = None

        def generate_span_id(self) -> int:
            return self.chosen if self.chosen is not None else super().generate_span_id()

    return Ids()


def _otlp_exporter(endpoint: str) -> SpanExporter:
    """Return an OTLP exporter over gRPC, configured by the OTEL_EXPORTER_* variables.

    An `http://` endpoint is plaintext.
    """
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint}: needs an exporter ({error}); "
            f"{install_command('otlp')}, or write spans to --traces-file"
        ) from error
    return OTLPSpanExporter(endpoint=endpoint)
