"""Access to a server: address, TLS, API key."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

import grpc

from flyspec import rpc
from flyspec.client import Credentials
from flyspec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A port, and the credentials to show there."""

    address: str
    credentials: Credentials = field(default_factory=Credentials)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of every call. Raises `ConfigError` for a key that cannot be sent."""
        return self.credentials.metadata()

    def http_url(self) -> str:
        """The base URL of the HTTP API there, `https` if the credentials have TLS.

        The address may begin with the scheme. Raises `ConfigError` for one that contradicts the
        credentials, and for files that cannot be used.
        """
        given, _, place = self.address.rpartition("://")
        scheme = "https" if self.credentials.security(self.address) else "http"
        if given not in ("", scheme):
            better = "https://" if scheme == "https" else "--ssl-ca-certs, for https"
            raise ConfigError(f"--address {self.address}: give {better}")
        parts = urlsplit(url := f"{scheme}://{place}")
        try:
            known = parts.hostname and parts.port and url == f"{scheme}://{parts.netloc}"
        except ValueError:
            known = False
        if not known:
            raise ConfigError(f"--address {self.address}: not HOST:PORT")
        return url

    def connect(self) -> grpc.Channel:
        """A channel of its own connection, opened on first use.

        Raises `ConfigError` for files that cannot be used.
        """
        security = self.credentials.security(self.address)
        options: list[tuple[str, int | str]] = [*rpc.CHANNEL_OPTIONS]
        if security is None:
            return grpc.insecure_channel(self.address, options=options)
        if security.target_name:
            options.append(("grpc.ssl_target_name_override", security.target_name))
        return grpc.secure_channel(self.address, security.credentials, options=options)
