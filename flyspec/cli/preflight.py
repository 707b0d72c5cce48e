"""What can be found wrong with a stack now, and not when a large model has been loaded."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from flyspec.config import OrchestratorSettings, from_command_line
from flyspec.errors import ConfigError

if TYPE_CHECKING:
    from flyspec.cli.stack import StackOptions

LOOPBACK = "127.0.0.1"


def check(options: StackOptions) -> None:
    """Raises `ConfigError` for whatever cannot work."""
    _check_security(options)
    _check_ports(options)
    _check_rules(options)


def _check_ports(o: StackOptions) -> None:
    for flag, host, port in (
        ("--port", o.host, o.port),
        ("--admin-port", o.admin_host, o.admin_port),
        ("--draft-port", LOOPBACK, o.draft_port),
        ("--verify-port", LOOPBACK, o.verify_port),
    ):
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


def _check_rules(o: StackOptions) -> None:
    from orchestrator.generation.rule_files import load_rules

    load_rules(o.rules_file or "", o.rule, o.num_speculative_tokens)


def _check_security(o: StackOptions) -> None:
    """Certificates, keys, and ports that are open by oversight."""
    from flyspec.security import ApiKeys

    flags = ["--host", o.host, "--admin-host", o.admin_host, *o.orchestrator_flags]
    settings = from_command_line(OrchestratorSettings, "orchestrator", flags)
    settings.port_security.credentials()
    settings.admin_security.credentials()
    if settings.api_keys_file:
        ApiKeys(settings.api_keys_file)
