"""Check that a port can be listened on; if not, the process that has it."""

from __future__ import annotations

import socket

from flyspec.errors import ConfigError


def check_port(flag: str, host: str, port: int) -> None:
    """Raise `ConfigError` for a port in use, or a host that is not this machine."""
    if problem := port_problem(host, port):
        raise ConfigError(
            f"{flag} {port}: cannot listen on {host}: {problem}; stop the other process or choose "
            "another port (0 picks a free one)"
        )


def port_problem(host: str, port: int) -> str:
    """Return why this process cannot listen there, with the process that does; empty if it can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return f"{error.strerror or error}{holder(port)}"
    return ""


def holder(port: int) -> str:
    """Return " (by NAME, process ID)" for the process that has a port, if it can be known.

    Where nothing listens, the system gave the port to an outgoing connection: said so, since no
    process need be stopped.
    """
    import psutil  # only if there is a problem

    try:
        having = [c for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port]
        listening = [c for c in having if c.status == psutil.CONN_LISTEN]
        for connection in listening:
            if connection.pid:
                return f" (by {_name(psutil.Process(connection.pid))}, process {connection.pid})"
        if having and not listening:
            return " (by an outgoing connection; free a minute after it ends)"
    except (psutil.Error, OSError):
        pass
    return ""


def _name(process: object) -> str:
    """Name of what a process runs: its program, or the module that its Python does."""
    command: list[str] = process.cmdline()  # type: ignore[attr-defined]
    for module in ("flyspec", "draft_service", "verify_service", "orchestrator"):
        if any(part == module or part.endswith(f"/{module}") for part in command):
            return module
    return str(process.name())  # type: ignore[attr-defined]
