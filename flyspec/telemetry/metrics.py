"""Metrics shared by several services, and collectors for metrics that belong to an event loop.

Names begin with `flyspec_` and are listed in docs/observability.md. Labels are bounded: no value
chosen by a client becomes one.
"""

from __future__ import annotations

import asyncio
import platform
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import grpc
from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from flyspec.security import TlsFiles, watch_certificates
from flyspec.values.rounds import SessionStatus
from flyspec.version import __version__

STEP_SECONDS = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15,
    0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0,
)  # fmt: skip
"""Buckets for parts of a round: from a GPU step to a minute for a long prompt on a CPU."""
REQUEST_SECONDS = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0,
    320.0, 640.0,
)  # fmt: skip
"""Buckets for waits of clients."""
SESSIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
SCRAPE_WAIT_S = 5.0
"""A scrape fails (`up` is 0) if the event loop does not answer for this long."""


def new_registry(service: str) -> CollectorRegistry:
    """Return a registry with metrics of the process, garbage collector and build."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    build = Info("flyspec_build", "Versions of this service.", registry=registry)
    build.info(
        {
            "service": service,
            "version": __version__,
            "grpc": grpc.__version__,
            "python": platform.python_version(),
        }
    )
    return registry


class CertificateExpiry(Collector):
    """Expiry of the current certificate. Raises `ConfigError` if that cannot be used."""

    def __init__(self, files: TlsFiles) -> None:
        self._watched = watch_certificates(files)

    def collect(self) -> Iterable[Metric]:
        expires = self._watched.current().expires
        if expires is not None:
            yield gauge(
                "flyspec_certificate_expiry_timestamp_seconds",
                "Expiry of this process's certificate, in seconds since 1970.",
                expires.timestamp(),
            )


class OnLoop(Collector):
    """Collects on the event loop that it was created on; scrapes come from other threads."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read
        self._loop = asyncio.get_running_loop()

    def collect(self) -> Iterable[Metric]:
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if here:
            return list(self._read())
        return asyncio.run_coroutine_threadsafe(self._collect(), self._loop).result(SCRAPE_WAIT_S)

    async def _collect(self) -> list[Metric]:
        return list(self._read())


class Buckets:
    """A histogram without locks or labels, five times as fast as prometheus_client's.

    `bounds` are the upper bounds of its buckets, ascending, without infinity.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += count * value

    def alone(self, name: str, documentation: str) -> HistogramMetricFamily:
        """Return it as a metric without labels."""
        family = HistogramMetricFamily(name, documentation)
        self.add_to(family, ())
        return family

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Add it to a metric, as cumulative counts."""
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        counts = zip(bounds, accumulate(self._counts), strict=True)
        family.add_metric(labels, list(counts), self._sum)


def step_histogram(
    registry: CollectorRegistry, name: str, documentation: str, *labels: str
) -> Histogram:
    """Return a histogram of seconds for a part of a round."""
    return Histogram(name, documentation, labels, registry=registry, buckets=STEP_SECONDS)


class EngineMetrics(Collector):
    """Durations, sessions and tokens of model steps."""

    def __init__(self, registry: CollectorRegistry, service: str) -> None:
        self._prefix = f"flyspec_{service}"
        self._seconds = Buckets(STEP_SECONDS)
        self._sessions, self._tokens = Buckets(SESSIONS), Buckets(TOKENS)
        self.watch(lambda: 0, lambda: 0)
        registry.register(self)

    def watch(self, num_failures: Callable[[], int], step_running_ns: Callable[[], int]) -> None:
        """Set the sources of failed steps and the current step's duration."""
        self._num_failures, self._step_running_ns = num_failures, step_running_ns

    def step(self, elapsed_ns: int, num_sessions: int, num_tokens: int, count: int = 1) -> None:
        """Record `count` such steps; called in the engine's thread."""
        self._seconds.observe(elapsed_ns / 1e9, count)
        self._sessions.observe(num_sessions, count)
        self._tokens.observe(num_tokens, count)

    def collect(self) -> Iterable[Metric]:
        prefix = self._prefix
        yield counter(
            f"{prefix}_model_failures",
            "Model steps that failed and were not retried.",
            self._num_failures(),
        )
        yield gauge(
            f"{prefix}_step_running_seconds",
            "Time the current step has been running; 0 between steps.",
            self._step_running_ns() / 1e9,
        )
        yield self._seconds.alone(
            f"{prefix}_step_seconds", "Duration of a model step, over all its sessions."
        )
        yield self._sessions.alone(f"{prefix}_step_sessions", "Sessions per step.")
        yield self._tokens.alone(f"{prefix}_step_tokens", "Tokens per step.")


def session_metrics(service: str, status: SessionStatus) -> Iterable[Metric]:
    """Yield metrics of a service's sessions and prefix cache."""
    prefix = f"flyspec_{service}"
    yield gauge(f"{prefix}_sessions", "Open sessions.", status.active)
    yield gauge(f"{prefix}_sessions_limit", "Maximum open sessions.", status.limit)
    yield counter(f"{prefix}_sessions_opened", "Sessions opened.", status.opened_total)
    yield counter(
        f"{prefix}_prefix_cache_queries",
        "Tokens looked up in the KV cache.",
        status.prefix_cache_queries,
    )
    yield counter(
        f"{prefix}_prefix_cache_hits",
        "Tokens found in the KV cache and not recomputed.",
        status.prefix_cache_hits,
    )


def cache_metrics(service: str, usage: float, num_preemptions: int) -> Iterable[Metric]:
    """Yield metrics of a service's KV cache, as vLLM counts them."""
    prefix = f"flyspec_{service}"
    yield gauge(
        f"{prefix}_kv_cache_usage_ratio",
        "Share of the KV cache's blocks, or slots, that sessions hold.",
        usage,
    )
    yield counter(
        f"{prefix}_num_preemptions",
        "Sequences that lost their blocks to older ones and were computed again.",
        num_preemptions,
    )


def gauge(name: str, documentation: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, documentation, value=value)


def counter(name: str, documentation: str, value: float) -> CounterMetricFamily:
    """Return a counter; its name gets the suffix `_total`."""
    return CounterMetricFamily(name, documentation, value=value)
