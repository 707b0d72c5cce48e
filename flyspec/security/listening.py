"""Security of listening ports: beyond loopback, encryption and client authentication.

Metrics and HTTP need TLS contexts of Python's, gRPC credentials of its own.
"""

from __future__ import annotations

import ipaddress
import logging
import ssl
from dataclasses import dataclass

import grpc

from flyspec.errors import ConfigError
from flyspec.flags import ClientAuth
from flyspec.security.certificates import SYSTEM, TlsFiles, read_certificates, server_credentials
from flyspec.security.watched_files import Watched

log = logging.getLogger(__name__)


def is_loopback(host: str) -> bool:
    """True if a host is only reachable from this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class PortSecurity:
    """Requirements of a port for its clients.

    `client_auth` None: `required` if there are CAs. A client certificate must have one of `names`,
    if any. `keys`: calls need an API key. `prefix` starts the names of this port's own flags, such
    as `admin-`.
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
        """True if clients must have a certificate."""
        if self.client_auth is None:
            return bool(self.files.ca_certs)
        return self.client_auth == "required"

    @property
    def encrypted(self) -> bool:
        return bool(self.files)

    def credentials(self) -> grpc.ServerCredentials | None:
        """Return the port's credentials; None for plaintext. Raises `ConfigError`."""
        self.check()
        if not self.encrypted:
            return None
        return server_credentials(self.files, self.wants_certificates)

    def check(self) -> None:
        """Raise `ConfigError` for a port that would be open to others by oversight."""
        flag = f"--{self.prefix}ssl-client-auth"
        if not self.encrypted and self.client_auth == "required":
            raise ConfigError(
                f"{flag} required: needs TLS; give --ssl-certfile, --ssl-keyfile, --ssl-ca-certs"
            )
        if self.names and not self.wants_certificates:
            raise ConfigError(
                f"--{self.prefix}ssl-client-names: needs client certificates; give --ssl-ca-certs"
            )
        if is_loopback(self.host):
            return
        where = f"--{self.prefix}host {self.host}"
        if not self.encrypted:
            if not self.allow_insecure:
                raise ConfigError(
                    f"{where}: would listen unencrypted beyond this machine; give --ssl-certfile "
                    "and --ssl-keyfile, or --allow-insecure if something else protects the port"
                )
            log.warning("%s: listening unencrypted", where)
        elif not self.wants_certificates and not self.keys:
            if self.client_auth is None and not self.allow_insecure:
                raise ConfigError(
                    f"{where}: would serve anyone who can reach it; give --ssl-ca-certs to require "
                    f"client certificates, or {flag} none if this is intended"
                )
            log.warning("%s: serving anyone who can reach it", where)


def watch_server_context(security: PortSecurity, what: str) -> Watched[ssl.SSLContext]:
    """Return a port's TLS context, which follows its files; `what` names them in the log.

    Raises `ConfigError`.
    """
    files = security.files

    def make() -> ssl.SSLContext:
        read_certificates(files)  # for its error messages
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(files.certfile, files.keyfile)
            if security.wants_certificates:
                context.verify_mode = ssl.CERT_REQUIRED
                if files.ca_certs == SYSTEM:
                    context.load_default_certs(ssl.Purpose.CLIENT_AUTH)
                else:
                    context.load_verify_locations(files.ca_certs)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"{what} cannot be used: {error}") from error
        return context

    return Watched(what, files.paths, make)
