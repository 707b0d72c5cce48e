"""What a port must have before it listens off loopback: encryption, and to know its clients."""

from __future__ import annotations

import ipaddress
import logging
from dataclasses import dataclass

import grpc

from flyspec.errors import ConfigError
from flyspec.flags import ClientAuth
from flyspec.security.certificates import TlsFiles
from flyspec.security.credentials import server_credentials

log = logging.getLogger(__name__)


def is_loopback(host: str) -> bool:
    """Whether an address, to listen on or to connect to, is of this machine alone."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class PortSecurity:
    """What a port asks of who connects.

    `client_auth` None is `required` if there are authorities to check with. `names` are those of
    which a client's certificate must have one, if not empty. `keys` says that calls need an API
    key. `prefix` begins the flags that are of this port alone: `admin-`.
    """

    host: str
    files: TlsFiles
    client_auth: ClientAuth | None = None
    names: tuple[str, ...] = ()
    keys: bool = False
    allow_insecure: bool = False
    prefix: str = ""

    @property
    def wants_certificates(self) -> bool:
        """Whether clients without a certificate get no connection."""
        if self.client_auth is None:
            return bool(self.files.ca_certs)
        return self.client_auth == "required"

    @property
    def encrypted(self) -> bool:
        """Whether the port speaks TLS."""
        return bool(self.files)

    def credentials(self) -> grpc.ServerCredentials | None:
        """The port's credentials; None to listen in the clear. Raises `ConfigError`."""
        self.check()
        if not self.encrypted:
            return None
        return server_credentials(self.files, self.wants_certificates)

    def check(self) -> None:
        """Refuse what would be open to others by oversight. Raises `ConfigError`."""
        flag = f"--{self.prefix}ssl-client-auth"
        if not self.encrypted and self.client_auth == "required":
            raise ConfigError(
                f"{flag} required: needs TLS; give --ssl-certfile, --ssl-keyfile, --ssl-ca-certs"
            )
        if self.names and not self.wants_certificates:
            raise ConfigError(
                f"--{self.prefix}ssl-client-names: needs clients' certificates; give --ssl-ca-certs"
            )
        if is_loopback(self.host):
            return
        where = f"--{self.prefix}host {self.host}"
        if not self.encrypted:
            if not self.allow_insecure:
                raise ConfigError(
                    f"{where}: would listen in the clear for other machines; give --ssl-certfile "
                    "and --ssl-keyfile, or --allow-insecure if something else protects the port"
                )
            log.warning("%s: listens in the clear", where)
        elif not self.wants_certificates and not self.keys:
            if self.client_auth is None and not self.allow_insecure:
                raise ConfigError(
                    f"{where}: would serve whoever reaches it; give --ssl-ca-certs to ask for "
                    f"clients' certificates, or say {flag} none if that is meant"
                )
            log.warning("%s: serves whoever reaches it", where)
