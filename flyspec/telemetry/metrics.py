"""Metrics that more than one service has, and how those are collected that live on an event loop.

Names begin with `flyspec_`; docs/observability.md has all of them. Labels are bounded: no name that
a client chose becomes one.
"""

from __future__ import annotations

import asyncio
import platform
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
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
from flyspec.values.sessions import SessionStatus

STEP_SECONDS = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15,
    0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0,
)  # fmt: skip
"""Buckets for parts of a round: half a millisecond on a GPU, a minute of a long prompt on a CPU."""
REQUEST_SECONDS = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0,
    320.0, 640.0,
)  # fmt: skip
"""Buckets for what a client waits for."""
SESSIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
SCRAPE_WAIT_S = 5.0
"""An event loop that does not come round for so long fails the scrape, which then says `up` 0."""


def flyspec_version() -> str:
    """The version that is installed."""
    try:
        return version("flyspec")
    except PackageNotFoundError:
        return "unknown"


def new_registry(service: str) -> CollectorRegistry:
    """A registry with what every process has: its memory, CPU time, collections, its build."""
    # A series beside each other one, which nobody asks for.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    build = Info("flyspec_build", "What runs here.", registry=registry)
    build.info(
        {
            "service": service,
            "version": flyspec_version(),
            "grpc": grpc.__version__,
            "python": platform.python_version(),
        }
    )
    return registry


class CertificateExpiry(Collector):
    """When the certificate that the files hold now expires: to be alerted before it does.

    Raises `ConfigError` if it cannot be used.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._watched = watch_certificates(files)

    def collect(self) -> Iterable[Metric]:
        """The time of its expiry; nothing without a certificate."""
        expires = self._watched.current().expires
        if expires is not None:
            yield gauge(
                "flyspec_certificate_expiry_timestamp_seconds",
                "When the certificate of this process expires, seconds since 1970.",
                expires.timestamp(),
            )


class OnLoop(Collector):
    """Collects on the event loop that was running when it was made.

    What it reads belongs to that loop; Prometheus asks in another thread.
    """

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read
        self._loop = asyncio.get_running_loop()

    def collect(self) -> Iterable[Metric]:
        """What `read` gives. Raises `TimeoutError` when the loop does not come round."""
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
    """A histogram of one thread: plain numbers, a fifth of the time of prometheus_client's.

    `bounds` are its buckets' upper ones, ascending, without infinity.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """So many more of `value`."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += count * value

    def alone(self, name: str, documentation: str) -> HistogramMetricFamily:
        """As a metric of its own, without labels."""
        family = HistogramMetricFamily(name, documentation)
        self.add_to(family, ())
        return family

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """As a metric: up to each bound, all below it included."""
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        counts = zip(bounds, accumulate(self._counts), strict=True)
        family.add_metric(labels, list(counts), self._sum)


def step_histogram(
    registry: CollectorRegistry, name: str, documentation: str, *labels: str
) -> Histogram:
    """A histogram of seconds, of something that is part of a round."""
    return Histogram(name, documentation, labels, registry=registry, buckets=STEP_SECONDS)


class EngineMetrics(Collector):
    """Steps of a service's model: how long, over how many sessions, of how many tokens."""

    def __init__(self, registry: CollectorRegistry, service: str) -> None:
        self._prefix = f"flyspec_{service}"
        self._seconds = Buckets(STEP_SECONDS)
        self._sessions, self._tokens = Buckets(SESSIONS), Buckets(TOKENS)
        self.watch(lambda: 0, lambda: 0)
        registry.register(self)

    def watch(self, num_failures: Callable[[], int], step_running_ns: Callable[[], int]) -> None:
        """Tell of failed steps and of the step at hand, too."""
        self._num_failures, self._step_running_ns = num_failures, step_running_ns

    def step(self, elapsed_ns: int, num_sessions: int, num_tokens: int, count: int = 1) -> None:
        """So many such steps have been run; called in the engine's thread."""
        self._seconds.observe(elapsed_ns / 1e9, count)
        self._sessions.observe(num_sessions, count)
        self._tokens.observe(num_tokens, count)

    def collect(self) -> Iterable[Metric]:
        """The three histograms, how many steps failed, and how long one runs already."""
        prefix = self._prefix
        yield counter(
            f"{prefix}_model_failures",
            "Steps of the model that failed, and were not run again.",
            self._num_failures(),
        )
        yield gauge(
            f"{prefix}_step_running_seconds",
            "Time that the step at hand has run; 0 between steps.",
            self._step_running_ns() / 1e9,
        )
        yield self._seconds.alone(
            f"{prefix}_step_seconds", "Time of one step of the model over all sessions in it."
        )
        yield self._sessions.alone(f"{prefix}_step_sessions", "Sessions that shared a step.")
        yield self._tokens.alone(
            f"{prefix}_step_tokens", "Tokens that went through the model in a step."
        )


def session_metrics(service: str, status: SessionStatus) -> Iterable[Metric]:
    """Sessions that a service holds, and what its cache was asked for."""
    prefix = f"flyspec_{service}"
    yield gauge(f"{prefix}_sessions", "Sessions open now.", status.active)
    yield gauge(f"{prefix}_sessions_limit", "Sessions that can be open at once.", status.limit)
    yield counter(f"{prefix}_sessions_opened", "Sessions opened.", status.opened_total)
    yield counter(
        f"{prefix}_prefix_cache_queries",
        "Tokens of sequences that were looked for in the KV cache.",
        status.prefix_cache_queries,
    )
    yield counter(
        f"{prefix}_prefix_cache_hits",
        "Tokens that were found there and not computed again.",
        status.prefix_cache_hits,
    )


def gauge(name: str, documentation: str, value: float) -> GaugeMetricFamily:
    """A gauge without labels."""
    return GaugeMetricFamily(name, documentation, value=value)


def counter(name: str, documentation: str, value: float) -> CounterMetricFamily:
    """A counter without labels; its name gets `_total`."""
    return CounterMetricFamily(name, documentation, value=value)
