"""gRPC credentials from PEM files, reloaded when the files change."""

from __future__ import annotations

import grpc

from flyspec.errors import ConfigError
from flyspec.security.certificates import SYSTEM, WHAT, TlsFiles, read_certificates
from flyspec.security.watched_files import Watched


def server_credentials(files: TlsFiles, require_client: bool) -> grpc.ServerCredentials:
    """Return a port's credentials; each handshake checks whether the files have changed.

    `require_client` refuses clients without a certificate from `files.ca_certs`. Raises
    `ConfigError`.
    """
    if not files.certfile:
        raise ConfigError("--ssl-ca-certs is given without --ssl-certfile and --ssl-keyfile")
    if require_client and not files.ca_certs:
        raise ConfigError(
            "--ssl-client-auth required: give the CAs of the clients' certificates with "
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
        return None if used is before else used  # None: unchanged

    return grpc.dynamic_ssl_server_credentials(used, look, require_client)


class ChannelSecurity:
    """TLS of channels to servers: trusted CAs and, optionally, our own certificate.

    `target_name` is the name that servers' certificates must have (empty: that of the address).
    Raises `ConfigError`.
    """

    def __init__(self, files: TlsFiles, target_name: str = "") -> None:
        if not files.ca_certs:
            raise ConfigError(
                "--ssl-certfile is given without --ssl-ca-certs: give the CAs of the server's "
                f"certificate, or `{SYSTEM}` for gRPC's default CAs"
            )
        self.target_name = target_name
        self._files = files
        self._watched = Watched(WHAT, files.paths, self._make)

    @property
    def credentials(self) -> grpc.ChannelCredentials:
        """The current credentials; the same object while the files are unchanged."""
        return self._watched.current()

    def _make(self) -> grpc.ChannelCredentials:
        read = read_certificates(self._files)
        return grpc.ssl_channel_credentials(read.authorities, read.key, read.chain)
