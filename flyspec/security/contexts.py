"""TLS contexts of the ports that are not gRPC's: metrics and HTTP."""

from __future__ import annotations

import ssl

from flyspec.errors import ConfigError
from flyspec.security.certificates import SYSTEM, read_certificates
from flyspec.security.listening import PortSecurity
from flyspec.security.watched_files import Watched


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
