"""Addresses of servers as users give them, HOST:PORT: what is wrong with one, what to give."""

from __future__ import annotations

import re

_URL = re.compile(r"(https?|grpcs?)://([^/]*)", re.IGNORECASE)
_HOST_PORT = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^\s:/,\[\]]+):(\d{1,5})")
_OTHER_TARGET = re.compile(r"(unix|unix-abstract|dns|ipv4|ipv6|vsock|xds):", re.IGNORECASE)
"""gRPC's own ways to name a server."""


def address_problem(address: str, kind: str, default_port: int) -> str:
    """Return why a client cannot call `address`, and what to give instead; empty if it can.

    `kind` names the port, whose usual number is `default_port`.
    """
    wanted = f"must be HOST:PORT of the {kind} port (default {default_port})"
    if url := _URL.match(address):
        host = url[2] if _HOST_PORT.fullmatch(url[2]) else f"{url[2] or 'HOST'}:{default_port}"
        return (
            f"{wanted}, which speaks gRPC, not a URL: give {host}, or if that is the HTTP port, "
            f"whose URL is for OpenAI's clients, {host.rpartition(':')[0]}:{default_port}"
        )
    if _OTHER_TARGET.match(address):
        return ""
    match = _HOST_PORT.fullmatch(address)
    if match and 0 < int(match[2]) < 1 << 16:
        return ""
    if match:
        return f"{wanted}; there is no port {match[2]}: it must be between 1 and 65535"
    if re.fullmatch(r"[\w.-]+|\[[0-9a-fA-F:.]+\]", address):
        return f"{wanted}; it has no port: give {address}:{default_port}"
    return f"{wanted}, such as 127.0.0.1:{default_port}"


def split_address(address: str) -> tuple[str, int] | None:
    """Return host and port of HOST:PORT; None if it is something else."""
    match = _HOST_PORT.fullmatch(address)
    return (match[1], int(match[2])) if match and 0 < int(match[2]) < 1 << 16 else None
