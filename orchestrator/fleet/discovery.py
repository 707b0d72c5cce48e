"""Which addresses a service has: a list, or every address of a DNS name (a headless service)."""

from __future__ import annotations

import asyncio
import logging
import re
import socket

from flyspec.errors import ConfigError

log = logging.getLogger(__name__)

DNS = "dns:///"
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/,\[\]]+):(\d{1,5})")


class Addresses:
    """What a setting such as `a:1,b:2` or `dns:///name:50051` stands for.

    Raises `ConfigError`, which begins with `what`, for one that cannot be read.
    """

    def __init__(self, spec: str, what: str) -> None:
        self.spec = spec
        self._static: list[str] = []
        self._names: list[tuple[str, int]] = []
        self._resolved: dict[tuple[str, int], list[str]] = {}
        for part in filter(None, (p.strip() for p in spec.split(","))):
            host, port = _split(part.removeprefix(DNS), what)
            if part.startswith(DNS):
                self._names.append((host, port))
            else:
                self._static.append(part)
        if not self._static and not self._names:
            raise ConfigError(f"{what}: no address; give host:port, several with commas between")

    def server_name(self, address: str) -> str:
        """The DNS name that stands for an address, which the certificate there has; else empty."""
        for (host, _), found in self._resolved.items():
            if address in found:
                return host
        return ""

    @property
    def hosts(self) -> list[str]:
        """The hosts in it, as they are written."""
        return [h for h, _ in self._names] + [a.rpartition(":")[0] for a in self._static]

    @property
    def changes(self) -> bool:
        """Whether another look may find others."""
        return bool(self._names)

    async def find(self) -> list[str]:
        """The addresses now, each once. A name that cannot be resolved keeps those it had."""
        found = list(self._static)
        for name in self._names:
            host, port = name
            try:
                infos = await asyncio.get_running_loop().getaddrinfo(
                    host, port, type=socket.SOCK_STREAM
                )
            except OSError as error:
                log.debug("%s%s: %s", DNS, host, error)
            else:
                hosts = [str(info[4][0]) for info in infos]
                self._resolved[name] = [
                    f"[{h}]:{port}" if ":" in h else f"{h}:{port}" for h in hosts
                ]
            found += self._resolved.get(name, [])
        return list(dict.fromkeys(found))


def _split(address: str, what: str) -> tuple[str, int]:
    """Host and port."""
    match = _ADDRESS.fullmatch(address)
    if not match or not 0 < int(match[2]) < 1 << 16:
        raise ConfigError(
            f"{what}: {address!r} is not an address; give host:port or {DNS}host:port"
        )
    return match[1], int(match[2])
