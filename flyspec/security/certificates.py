"""Certificate files: read, checked so that what is wrong is said at once, and read again."""

from __future__ import annotations

import datetime
import logging
from dataclasses import dataclass
from typing import Any

from flyspec.errors import ConfigError
from flyspec.security.watched_files import Watched, read_bytes

log = logging.getLogger(__name__)

WARN_SHARE = 0.1
"""A certificate that is loaded with less of its lifetime left should have been renewed."""
WHAT = "the certificates"
SYSTEM = "system"
"""In the place of a file of authorities: those that gRPC brings along."""


@dataclass(frozen=True)
class TlsFiles:
    """Where certificates are: PEM files, each empty for none.

    `certfile` (its chain included) and `keyfile` are this process's own, `ca_certs` the authorities
    that peers must chain to.
    """

    certfile: str = ""
    keyfile: str = ""
    ca_certs: str = ""

    def __bool__(self) -> bool:
        return bool(self.certfile or self.keyfile or self.ca_certs)

    @property
    def paths(self) -> list[str]:
        """The files to look at."""
        return [p for p in (self.certfile, self.keyfile, self.ca_certs) if p and p != SYSTEM]


@dataclass(frozen=True, eq=False)
class Certificates:
    """The content of `TlsFiles`, checked; None for what is not given.

    `expires` is when the first certificate of `chain` does.
    """

    chain: bytes | None
    key: bytes | None
    authorities: bytes | None
    expires: datetime.datetime | None


def watch_certificates(files: TlsFiles) -> Watched[Certificates]:
    """The certificates of these files, as they are now. Raises `ConfigError`."""
    return Watched(WHAT, files.paths, lambda: read_certificates(files))


def read_certificates(files: TlsFiles) -> Certificates:
    """Read and check. Raises `ConfigError` that names the setting and what is wrong."""
    if bool(files.certfile) != bool(files.keyfile):
        given, lacking = ("ssl-certfile", "ssl-keyfile")[:: 1 if files.certfile else -1]
        raise ConfigError(f"--{given} is given without --{lacking}; give both")
    chain = key = authorities = expires = None
    if files.certfile:
        chain = read_bytes(files.certfile, "--ssl-certfile")
        key = read_bytes(files.keyfile, "--ssl-keyfile")
        expires = _check_pair(files, chain, key)
    if files.ca_certs and files.ca_certs != SYSTEM:
        authorities = read_bytes(files.ca_certs, "--ssl-ca-certs")
        _load(authorities, f"--ssl-ca-certs {files.ca_certs}")
    return Certificates(chain, key, authorities, expires)


def _check_pair(files: TlsFiles, chain: bytes, key: bytes) -> datetime.datetime:
    """When a certificate expires that is valid now and fits its key."""
    # Loaded here, since only who uses TLS needs it.
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
            f"--ssl-keyfile {files.keyfile}: is no PEM private key without a password: {error}"
        ) from None
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if own.public_key().public_bytes(*form) != private.public_key().public_bytes(*form):
        raise ConfigError(
            f"{where}: is not the certificate of the key in --ssl-keyfile {files.keyfile}; the "
            "first one in the file must be"
        )
    now = datetime.datetime.now(datetime.UTC)
    expires: datetime.datetime = own.not_valid_after_utc
    if expires < now:
        raise ConfigError(f"{where}: expired at {expires:%Y-%m-%d %H:%M} UTC; renew it")
    if own.not_valid_before_utc > now:
        raise ConfigError(
            f"{where}: is not valid before {own.not_valid_before_utc:%Y-%m-%d %H:%M} UTC; is the "
            "clock right?"
        )
    if expires - now < WARN_SHARE * (expires - own.not_valid_before_utc):
        log.warning("%s: expires at %s UTC; renew it", where, f"{expires:%Y-%m-%d %H:%M}")
    return expires


def _load(pem: bytes, where: str) -> list[Any]:
    """The certificates in a file, at least one."""
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ConfigError(f"{where}: holds no PEM certificate: {error}") from None
