"""Finds a service's addresses: a fixed list, or all addresses of a DNS name (headless service)."""

from __future__ import annotations

import asyncio
import logging
import socket

from flyspec.addresses import split_address
from flyspec.errors import ConfigError

log = logging.getLogger(__name__)

DNS = "dns:///"


class Addresses:
    """The addresses named by a setting such as `a:1,b:2` or `dns:///name:50051`.

    Raises `ConfigError`, prefixed with `what`, if the setting is invalid.
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
            raise ConfigError(f"{what}: no address; give host:port, separated by commas")

    def server_name(self, address: str) -> str:
        """Return the DNS name an address was resolved from, to verify its certificate; or ""."""
        for (host, _), found in self._resolved.items():
            if address in found:
                return host
        return ""

    @property
    def hosts(self) -> list[str]:
        return [h for h, _ in self._names] + [a.rpartition(":")[0] for a in self._static]

    @property
    def changes(self) -> bool:
        """True if the addresses may change, that is, whether any comes from DNS."""
        return bool(self._names)

    async def find(self) -> list[str]:
        """Return the current addresses, without duplicates.

        A name that cannot be resolved keeps its previous addresses.
        """
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
    found = split_address(address)
    if found is None:
        plain = address.partition("://")[2].rstrip("/")
        instead = plain if split_address(plain) else "host:port"
        raise ConfigError(f"{what}: invalid address {address!r}; give {instead} or {DNS}host:port")
    return found
