"""What a client shows to a server, and what it asks of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from flyspec.errors import ConfigError
from flyspec.metadata import AUTHORIZATION_KEY
from flyspec.security import ChannelSecurity, TlsFiles, is_loopback


@dataclass(frozen=True)
class Credentials:
    """An API key, and PEM files; the files are read again when they change. All may be empty.

    With `ssl_ca_certs`, the authorities of the server's certificate (or `system` for well-known
    ones), the client speaks TLS. `ssl_certfile` and `ssl_keyfile` are its own certificate, for
    servers that ask for one. `ssl_target_name` is the name that the server's certificate must have;
    empty: that of its address. `allow_insecure` sends the key in the clear to other machines.
    """

    api_key: str = field(default="", repr=False)
    ssl_ca_certs: str = ""
    ssl_certfile: str = ""
    ssl_keyfile: str = ""
    ssl_target_name: str = ""
    allow_insecure: bool = False

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call. Raises `ConfigError` for a key that cannot be sent."""
        key = self.api_key.strip()
        if not (key.isascii() and key.isprintable()):
            raise ConfigError("--api-key: has characters that no key has; was it copied whole?")
        return ((AUTHORIZATION_KEY, f"Bearer {key}"),) if key else ()

    def security(self, address: str) -> ChannelSecurity | None:
        """How to speak to a server there; None is in the clear. Raises `ConfigError`."""
        files = TlsFiles(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)
        if files:
            return ChannelSecurity(files, self.ssl_target_name)
        if self.ssl_target_name:
            raise ConfigError("--ssl-target-name: needs TLS; give --ssl-ca-certs")
        if self.api_key and not self.allow_insecure and not is_loopback(_host(address)):
            raise ConfigError(
                f"the API key would go to {address} in the clear, for anybody to read; give "
                "--ssl-ca-certs, or --allow-insecure if something else protects the way there"
            )
        return None


def _host(address: str) -> str:
    return address.rpartition("/")[2].rpartition(":")[0]
