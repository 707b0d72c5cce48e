"""gRPC credentials that follow their files: new connections use what the files hold now."""

from __future__ import annotations

import grpc

from flyspec.errors import ConfigError
from flyspec.security.certificates import SYSTEM, Certificates, TlsFiles, watch_certificates
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
    watched = watch_certificates(files)
    used = watched.current()

    def look() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        found = watched.current()
        if found is used:
            return None  # as it was
        used = found
        return _configuration(found, require_client)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used, require_client), look, require_client
    )


def _configuration(
    certificates: Certificates, require_client: bool
) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(certificates.key, certificates.chain)],
        certificates.authorities if require_client else None,
    )


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
        self._watched: Watched[Certificates] = watch_certificates(files)
        self._used = self._watched.current()
        self._credentials = self._make()

    @property
    def credentials(self) -> grpc.ChannelCredentials:
        """Those to open a channel with now; the same object as long as the files are the same."""
        found = self._watched.current()
        if found is not self._used:
            self._used = found
            self._credentials = self._make()
        return self._credentials

    def _make(self) -> grpc.ChannelCredentials:
        used = self._used
        return grpc.ssl_channel_credentials(used.authorities, used.key, used.chain)
