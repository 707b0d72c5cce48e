"""gRPC credentials that follow their files: new connections use what the files hold now."""

from __future__ import annotations

import grpc

from flyspec.errors import ConfigError
from flyspec.security.certificates import SYSTEM, WHAT, TlsFiles, read_certificates
from flyspec.security.watched_files import Watched


def server_credentials(files: TlsFiles, require_client: bool) -> grpc.ServerCredentials:
    """Credentials of a port; gRPC asks at every handshake whether the files have changed.

    With `require_client` a client without a certificate of `files.ca_certs` gets no connection.
    Raises `ConfigError`.
    """
    if not files.certfile:
        raise ConfigError("--ssl-ca-certs is given without --ssl-certfile and --ssl-keyfile")
    if require_client and not files.ca_certs:
        raise ConfigError(
            "--ssl-client-auth required: give the authorities of the clients' certificates, "
            "--ssl-ca-certs"
        )

    def make() -> grpc.ServerCertificateConfiguration:
        read = read_certificates(files)
        return grpc.ssl_server_certificate_configuration(
            [(read.key, read.chain)], read.authorities if require_client else None
        )

    watched = Watched(WHAT, files.paths, make)
    used = watched.current()

    def look() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        before, used = used, watched.current()
        return None if used is before else used  # None: as it was

    return grpc.dynamic_ssl_server_credentials(used, look, require_client)


class ChannelSecurity:
    """How channels to servers are secured: trust in `files.ca_certs`, our own certificate if any.

    The authorities `system` are those that gRPC brings along. `target_name` is the name that the
    servers' certificates must have; empty: that of their address. Raises `ConfigError`.
    """

    def __init__(self, files: TlsFiles, target_name: str = "") -> None:
        if not files.ca_certs:
            raise ConfigError(
                "--ssl-certfile is given without --ssl-ca-certs: give the authorities of the "
                f"server's certificate, or `{SYSTEM}` for well-known ones"
            )
        self.target_name = target_name
        self._files = files
        self._watched = Watched(WHAT, files.paths, self._make)

    @property
    def credentials(self) -> grpc.ChannelCredentials:
        """Those to open a channel with now; the same object as long as the files are the same."""
        return self._watched.current()

    def _make(self) -> grpc.ChannelCredentials:
        read = read_certificates(self._files)
        return grpc.ssl_channel_credentials(read.authorities, read.key, read.chain)
