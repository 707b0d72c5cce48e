"""Connections to a server: address, TLS, API key."""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc

from flyspec import rpc
from flyspec.client import Credentials


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A port, and the credentials to show there."""

    address: str
    credentials: Credentials = field(default_factory=Credentials)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call. Raises `ConfigError` for a key that cannot be sent."""
        return self.credentials.metadata()

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
