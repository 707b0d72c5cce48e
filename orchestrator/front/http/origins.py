"""Which pages' requests are served: browsers send those of any site to wherever it says."""

from __future__ import annotations

from collections.abc import Mapping

from flyspec.config import OrchestratorSettings
from flyspec.errors import PermissionDeniedError
from flyspec.security.hosts import ALL, is_served


class Origins:
    """Refuses requests by foreign names, and those of other origins' pages.

    A name needs no check where a client must have a key or certificate: a page of another name has
    neither.
    """

    def __init__(self, settings: OrchestratorSettings) -> None:
        security = settings.port_security
        guarded = security.keys or security.wants_certificates
        self._hosts = (ALL,) if guarded else (settings.host, *settings.hosts)
        self._origins = settings.origins

    def admit(self, headers: Mapping[bytes, bytes]) -> None:
        """Raises `PermissionDeniedError`. Requests that no browser sends may lack both headers."""
        host = headers.get(b"host", b"").decode("latin-1")
        if host and not is_served(host, self._hosts):
            raise PermissionDeniedError(
                f"this server is not called by the name {host!r:.200}; use its IP address, or add "
                "the name to --allowed-hosts"
            )
        origin = headers.get(b"origin", b"").decode("latin-1")
        own = origin.partition("://")[2].lower() == host.lower()
        if origin and not own and not {origin, ALL} & {*self._origins}:
            raise PermissionDeniedError(
                f"pages of {origin!r:.200} may not call this server; add the origin to "
                "--http-allowed-origins, or have the proxy in front of this server keep the Host"
            )
