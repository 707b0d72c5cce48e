"""What can be found wrong before a large model has been loaded."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from flyspec.config import OrchestratorSettings, from_command_line
from flyspec.errors import ConfigError


def check_port(flag: str, host: str, port: int) -> None:
    """Raises `ConfigError` for a port that is in use, or a host that is not this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"{flag} {port}: cannot listen on {host}: "
                f"{getattr(error, 'strerror', None) or error}; stop the other process or "
                "choose another port (0 picks a free one)"
            ) from None


def check_security(flags: Sequence[str]) -> None:
    """Raises `ConfigError` for certificates or keys that cannot work, or ports left open.

    `flags` are the orchestrator's.
    """
    from flyspec.security import ApiKeys

    settings = from_command_line(OrchestratorSettings, "orchestrator", flags)
    settings.port_security.credentials()
    settings.admin_security.credentials()
    if settings.api_keys_file:
        ApiKeys(settings.api_keys_file)
