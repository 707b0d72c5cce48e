"""What a client shows to a server, and what it asks of it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated

from flyspec.errors import ConfigError
from flyspec.flags import Flag, flags_of
from flyspec.metadata import AUTHORIZATION_KEY

if TYPE_CHECKING:
    from flyspec.security import ChannelSecurity

_flag = partial(Flag, group="Connection to a running server")


@dataclass(frozen=True)
class Credentials:
    """An API key, and PEM files; the files are read again when they change. All may be empty.

    With `ssl_ca_certs`, the authorities of the server's certificate (or `system` for well-known
    ones), the client speaks TLS. `ssl_certfile` and `ssl_keyfile` are its own certificate, for
    servers that ask for one. `ssl_target_name` is the name that the server's certificate must have;
    empty: that of its address. `allow_insecure` sends the key in the clear to other machines.
    """

    # fmt: off
    api_key: Annotated[str, _flag(
        "API key. Prefer the environment variable: other users can see command lines.",
        env="FLYSPEC_API_KEY",
    )] = field(default="", repr=False)
    ssl_ca_certs: Annotated[str, _flag(
        "Use TLS and trust the CAs in this PEM file, or 'system' for gRPC's default CAs.",
        env="FLYSPEC_SSL_CA_CERTS",
    )] = ""
    ssl_certfile: Annotated[str, _flag(
        "PEM file with the client certificate.", env="FLYSPEC_SSL_CERTFILE",
    )] = ""
    ssl_keyfile: Annotated[str, _flag(
        "PEM file with its private key.", env="FLYSPEC_SSL_KEYFILE",
    )] = ""
    ssl_target_name: Annotated[str, _flag(
        "Name that the server's certificate must have.", env="FLYSPEC_SSL_TARGET_NAME",
        default="the host in the address",
    )] = ""
    allow_insecure: Annotated[bool, _flag(
        "Send the API key unencrypted even to other machines.",
    )] = False
    # fmt: on

    @classmethod
    def from_environment(cls) -> Credentials:
        """As `FLYSPEC_API_KEY`, `FLYSPEC_SSL_CA_CERTS` and so on say."""
        given = {name: flag.env for name, (_, flag) in flags_of(cls).items() if flag.env}
        return cls(**{name: os.environ.get(env, "") for name, env in given.items()})  # type: ignore[arg-type]

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call. Raises `ConfigError` for a key that cannot be sent."""
        key = self.api_key.strip()
        if not (key.isascii() and key.isprintable()):
            raise ConfigError("--api-key: has characters that no key has; was it copied whole?")
        return ((AUTHORIZATION_KEY, f"Bearer {key}"),) if key else ()

    def security(self, address: str) -> ChannelSecurity | None:
        """How to speak to a server there; None is in the clear. Raises `ConfigError`."""
        from flyspec.security import ChannelSecurity, TlsFiles, is_loopback

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
