"""A certificate authority and the files it issues."""

from __future__ import annotations

import datetime
import ipaddress
import shutil
from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from flyspec.client import Credentials
from flyspec.security import TlsFiles

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """Files of a certificate and its key."""

    certfile: str
    keyfile: str


class Authority:
    """Signs certificates into a folder."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            self._builder(self._name, self._key, -DAY, DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.file = str(folder / f"{name}.pem")
        Path(self.file).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def _builder(self, subject, key, begin, end) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + begin)
            .not_valid_after(now + end)
        )

    def pair(
        self,
        name: str,
        *alternatives: str,
        begin: datetime.timedelta = -DAY,
        end: datetime.timedelta = DAY,
        stem: str = "",
    ) -> Pair:
        """A certificate for a name and others, currently valid unless specified otherwise."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(subject, key, min(begin, end - DAY), end).add_extension(
            x509.SubjectAlternativeName([_alternative(a) for a in (name, *alternatives)]),
            critical=False,
        )
        certificate = builder.sign(self._key, hashes.SHA256())
        pair = Pair(*(str(self._folder / f"{stem or name}.{end}") for end in ("crt", "key")))
        Path(pair.certfile).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        Path(pair.keyfile).write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return pair

    def server(self, name: str = "server", **options) -> Pair:
        """A certificate for this machine."""
        return self.pair(name, "localhost", "127.0.0.1", **options)


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def files(pair: Pair | None, authority: Authority | None) -> TlsFiles:
    """Settings of a port or channel."""
    return TlsFiles(
        pair.certfile if pair else "",
        pair.keyfile if pair else "",
        authority.file if authority else "",
    )


def credentials(authority: Authority | None = None, pair: Pair | None = None, **more):
    """Settings of a client."""
    return Credentials(
        ssl_ca_certs=authority.file if authority else "",
        ssl_certfile=pair.certfile if pair else "",
        ssl_keyfile=pair.keyfile if pair else "",
        **more,
    )


def flags(pair: Pair, authority: Authority | None) -> tuple[str, ...]:
    """Settings of a service."""
    found = ("--ssl-certfile", pair.certfile, "--ssl-keyfile", pair.keyfile)
    return (*found, "--ssl-ca-certs", authority.file) if authority else found


def replace_files(pair, other) -> None:
    """Write another certificate into the files of a pair, as a tool would, one after the other."""
    shutil.copyfile(other.certfile, pair.certfile)
    shutil.copyfile(other.keyfile, pair.keyfile)


def unchecked(authority, pair) -> grpc.ChannelCredentials:
    """A client's credentials, from files it does not check."""
    contents = [Path(name).read_bytes() for name in (authority.file, pair.keyfile, pair.certfile)]
    return grpc.ssl_channel_credentials(*contents)
