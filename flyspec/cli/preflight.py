"""Checks made before a large model is loaded."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from flyspec.config import OrchestratorSettings, from_command_line
from flyspec.errors import ConfigError


def check_port(flag: str, host: str, port: int) -> None:
    """Raise `ConfigError` for a port in use, or a host that is not this machine."""
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
    """Raise `ConfigError` for bad certificates or keys, or ports left open.

    `flags` are the orchestrator's.
    """
    from flyspec.security import ApiKeys

    settings = from_command_line(OrchestratorSettings, "orchestrator", flags)
    settings.port_security.credentials()
    settings.admin_security.credentials()
    if settings.api_keys_file:
        ApiKeys(settings.api_keys_file)
