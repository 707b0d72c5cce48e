"""Reads and checks certificate files; gRPC credentials that are reloaded when the files change."""

from __future__ import annotations

import datetime
import logging
from dataclasses import dataclass
from typing import Any

import grpc

from flyspec.errors import ConfigError
from flyspec.security.watched_files import Watched, read_bytes

log = logging.getLogger(__name__)

WARN_SHARE = 0.1
"""Warn about certificates with less than this fraction of their lifetime left."""
WHAT = "the certificates"
SYSTEM = "system"
"""Instead of a file of CAs: gRPC's default CAs."""


@dataclass(frozen=True)
class TlsFiles:
    """Paths of PEM files, empty if none: our certificate chain, its key, and CAs of peers."""

    certfile: str = ""
    keyfile: str = ""
    ca_certs: str = ""

    def __bool__(self) -> bool:
        return bool(self.certfile or self.keyfile or self.ca_certs)

    @property
    def paths(self) -> list[str]:
        return [p for p in (self.certfile, self.keyfile, self.ca_certs) if p and p != SYSTEM]


@dataclass(frozen=True, eq=False)
class Certificates:
    """Checked content of `TlsFiles`, and when our certificate expires; None where not given."""

    chain: bytes | None
    key: bytes | None
    authorities: bytes | None
    expires: datetime.datetime | None


def watch_certificates(files: TlsFiles) -> Watched[Certificates]:
    """Read certificates and reload them when the files change. Raises `ConfigError`."""
    return Watched(WHAT, files.paths, lambda: read_certificates(files))


def read_certificates(files: TlsFiles) -> Certificates:
    """Read and check certificates. Raises `ConfigError`, naming the setting."""
    if bool(files.certfile) != bool(files.keyfile):
        raise _half(*("ssl-certfile", "ssl-keyfile")[:: 1 if files.certfile else -1])
    chain = key = authorities = expires = None
    if files.certfile:
        chain = read_bytes(files.certfile, "--ssl-certfile")
        key = read_bytes(files.keyfile, "--ssl-keyfile")
        expires = _check_pair(files, chain, key)
    if files.ca_certs and files.ca_certs != SYSTEM:
        authorities = read_bytes(files.ca_certs, "--ssl-ca-certs")
        _load(authorities, f"--ssl-ca-certs {files.ca_certs}")
    return Certificates(chain, key, authorities, expires)


def _half(given: str, lacking: str) -> ConfigError:
    return ConfigError(f"--{given} is given without --{lacking}; give both")


def _check_pair(files: TlsFiles, chain: bytes, key: bytes) -> datetime.datetime:
    """Check that the certificate is valid and matches its key; return when it expires."""
    # Only needed for TLS.
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        PublicFormat,
        load_pem_private_key,
    )

    where = f"--ssl-certfile {files.certfile}"
    own = _load(chain, where)[0]
    try:
        private = load_pem_private_key(key, None)
    except (ValueError, TypeError) as error:  # TypeError: it has a password
        raise ConfigError(
            f"--ssl-keyfile {files.keyfile}: not a PEM private key without a password: {error}"
        ) from None
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if own.public_key().public_bytes(*form) != private.public_key().public_bytes(*form):
        raise ConfigError(
            f"{where}: the first certificate does not match the key in "
            f"--ssl-keyfile {files.keyfile}"
        )
    now = datetime.datetime.now(datetime.UTC)
    expires: datetime.datetime = own.not_valid_after_utc
    if expires < now:
        raise ConfigError(f"{where}: expired at {expires:%Y-%m-%d %H:%M} UTC; renew it")
    if own.not_valid_before_utc > now:
        raise ConfigError(
            f"{where}: not valid before {own.not_valid_before_utc:%Y-%m-%d %H:%M} UTC; is the "
            "clock right?"
        )
    if expires - now < WARN_SHARE * (expires - own.not_valid_before_utc):
        log.warning("%s: expires at %s UTC; renew it", where, f"{expires:%Y-%m-%d %H:%M}")
    return expires


def _load(pem: bytes, where: str) -> list[Any]:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ConfigError(f"{where}: contains no PEM certificate: {error}") from None


def server_credentials(files: TlsFiles, require_client: bool) -> grpc.ServerCredentials:
    """Return a port's credentials; each handshake checks whether the files have changed.

    `require_client` refuses clients without a certificate from `files.ca_certs`. Raises
    `ConfigError`.
    """
    if not files.certfile and not files.keyfile:
        raise ConfigError("--ssl-ca-certs is given without --ssl-certfile and --ssl-keyfile")
    if not files.certfile:
        raise _half("ssl-keyfile", "ssl-certfile")
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
