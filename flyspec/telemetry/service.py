"""Telemetry of one service: registry, metrics port, call metrics and traces."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import grpc
from prometheus_client.core import Metric

from flyspec.config import NO_PORT, DraftSettings, OrchestratorSettings, VerifySettings
from flyspec.telemetry.interceptor import CallMetrics, Calls
from flyspec.telemetry.metrics import CertificateExpiry, OnLoop, new_registry
from flyspec.telemetry.port import MetricsPort, PortTakenError
from flyspec.telemetry.traces import Traces

log = logging.getLogger(__name__)

Settings = OrchestratorSettings | DraftSettings | VerifySettings

DEFAULT_PORTS = {"orchestrator": 9464, "draft": 9465, "verify": 9466}


class Telemetry:
    """Telemetry of `orchestrator`, `draft` or `verify`. Raises `ConfigError`.

    Has its own registry, so that several services can share a process. Without settings, nothing
    is exported.
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
        """Return a server's interceptors; with `make_ids`, requests without ID get one."""
        return [Calls(self.calls, make_ids)]

    def collect(self, read: Callable[[], Iterable[Metric]]) -> None:
        """Register metrics to read on the current event loop at each scrape."""
        self.registry.register(OnLoop(read))

    def listen(self) -> int | None:
        """Open the metrics port and return it; None if disabled.

        Raises `ConfigError` if an explicitly chosen port is not available.
        """
        settings = self._settings
        if settings is None or settings.metrics_port == NO_PORT:
            return None
        port, security = settings.metrics_port, settings.port_security
        if port is None:  # not explicitly chosen: fall back to a free port
            port = DEFAULT_PORTS[self.service] if settings.port else 0
        try:
            self._port = MetricsPort(security, port, self.registry)
        except PortTakenError:
            if settings.metrics_port is not None:
                raise
            log.warning("metrics port %d is in use, using another; see --metrics-port", port)
            self._port = MetricsPort(security, 0, self.registry)
        log.info("metrics at %s:%d", settings.host, self._port.port)
        return self._port.port

    def close(self) -> None:
        """Close the port and send pending spans."""
        if self._port is not None:
            self._port.close()
        self.traces.close()
