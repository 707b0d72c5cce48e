"""What one service tells of itself, put together: its registry, metrics port, calls, traces."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import grpc
from prometheus_client.core import Metric

from flyspec.config import DraftSettings, OrchestratorSettings, VerifySettings
from flyspec.telemetry.interceptor import CallMetrics, Calls
from flyspec.telemetry.metrics import CertificateExpiry, OnLoop, new_registry
from flyspec.telemetry.port import MetricsPort, PortTakenError
from flyspec.telemetry.traces import Traces

log = logging.getLogger(__name__)

Settings = OrchestratorSettings | DraftSettings | VerifySettings

DEFAULT_PORTS = {"orchestrator": 9464, "draft": 9465, "verify": 9466}
NO_PORT = -1


class Telemetry:
    """Of a service: `orchestrator`, `draft` or `verify`. Raises `ConfigError`.

    The registry is its own, so that several services can live in one process. Without settings it
    keeps its metrics to itself, and traces nothing.
    """

    def __init__(self, service: str, settings: Settings | None = None) -> None:
        self.service = service
        self._settings = settings
        self.registry = new_registry(service)
        self.calls = CallMetrics(self.registry)
        if settings is None:
            self.traces = Traces(service)
        else:
            self.traces = Traces(
                service,
                settings.otlp_traces_endpoint,
                settings.traces_file,
                settings.traces_sample_ratio,
            )
            if settings.ssl_certfile:
                self.registry.register(CertificateExpiry(settings.tls_files))
        self._port: MetricsPort | None = None

    def interceptors(self, make_ids: bool = False) -> list[grpc.aio.ServerInterceptor]:
        """Of a server of this service; with `make_ids`, requests come in there."""
        return [Calls(self.calls, make_ids)]

    def collect(self, read: Callable[[], Iterable[Metric]]) -> None:
        """Metrics that are read on this event loop whenever Prometheus asks."""
        self.registry.register(OnLoop(read))

    def listen(self) -> int | None:
        """Open the metrics port; its number, None if there is to be none.

        Raises `ConfigError` if the settings name one that cannot be had.
        """
        settings = self._settings
        if settings is None or settings.metrics_port == NO_PORT:
            return None
        port, security = settings.metrics_port, settings.port_security
        if port is None:  # nobody chose one: if it is taken, a service rather serves than ends
            port = DEFAULT_PORTS[self.service] if settings.port else 0
        try:
            self._port = MetricsPort(security, port, self.registry)
        except PortTakenError:
            if settings.metrics_port is not None:
                raise
            log.warning("the metrics port %d is in use; taking another, see --metrics-port", port)
            self._port = MetricsPort(security, 0, self.registry)
        log.info("metrics at %s:%d", settings.host, self._port.port)
        return self._port.port

    def close(self) -> None:
        """Close the port and send the spans that wait."""
        if self._port is not None:
            self._port.close()
        self.traces.close()
