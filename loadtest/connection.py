"""The one way to a server: address, TLS, API key."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import grpc

from flyspec import rpc
from flyspec.security import ChannelSecurity, TlsFiles


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A port and how to reach it. Encrypted if `tls` names files; `api_key` goes with every call.

    Raises `ConfigError` for files that cannot be used.
    """

    address: str
    api_key: str = field(default="", repr=False)
    tls: TlsFiles | None = None
    _security: ChannelSecurity | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        if self.tls:
            object.__setattr__(self, "_security", ChannelSecurity(self.tls))

    def at(self, address: str) -> Endpoint:
        """Another port of the same installation."""
        return replace(self, address=address)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()

    def connect(self) -> grpc.Channel:
        """A channel of its own connection, opened on first use."""
        options = rpc.CHANNEL_OPTIONS
        if self._security is None:
            return grpc.insecure_channel(self.address, options=options)
        return grpc.secure_channel(self.address, self._security.credentials, options=options)
