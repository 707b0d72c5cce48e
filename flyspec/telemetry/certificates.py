"""When this process's certificate expires, as a metric: to be alerted before it does."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from flyspec.security import TlsFiles, watch_certificates
from flyspec.telemetry.metrics import gauge


class CertificateExpiry(Collector):
    """Reads the certificate that the files hold now. Raises `ConfigError` if it cannot be used."""

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
