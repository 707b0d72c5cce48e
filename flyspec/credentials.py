"""A client's API key and TLS settings."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Self

from flyspec.errors import ConfigError
from flyspec.flags import Flag, flags_of
from flyspec.metadata import AUTHORIZATION_KEY

if TYPE_CHECKING:
    from flyspec.security import ChannelSecurity

_flag = partial(Flag, group="Connection to a running server")


@dataclass(frozen=True)
class Credentials:
    """An API key and PEM files (reloaded when they change); all optional, as the flags say."""

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
    names: Mapping[str, str] = field(
        default_factory=lambda: _names(lambda name, flag: name), repr=False, compare=False
    )
    """Names of the settings in errors, instead of their flags: by default, the fields."""

    @classmethod
    def from_environment(cls) -> Credentials:
        """Read `FLYSPEC_API_KEY`, `FLYSPEC_SSL_CA_CERTS` and so on."""
        given = {name: flag.env for name, (_, flag) in flags_of(cls).items() if flag.env}
        names = _names(lambda name, flag: flag.env or name)
        values = {name: os.environ.get(env, "") for name, env in given.items()}
        return cls(**values, names=names)  # type: ignore[arg-type]

    def on_command_line(self) -> Self:
        """Return these credentials of a command, whose errors name flags and variables."""
        names = _names(lambda name, flag: flag.env if _is_set(flag.env) else flag.typed(name))
        return replace(self, names=names)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of every call. Raises `ConfigError` for a malformed key."""
        key = self.api_key.strip()
        if not (key.isascii() and key.isprintable()):
            raise ConfigError("--api-key: contains invalid characters; was it copied correctly?")
        return ((AUTHORIZATION_KEY, f"Bearer {key}"),) if key else ()

    def security(self, address: str) -> ChannelSecurity | None:
        """Return the TLS for a server's address; None for plaintext. Raises `ConfigError`."""
        from flyspec.security import ChannelSecurity, TlsFiles, is_loopback

        files = TlsFiles(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)
        if files:
            return ChannelSecurity(files, self.ssl_target_name)
        if self.ssl_target_name:
            raise ConfigError("--ssl-target-name: needs TLS; give --ssl-ca-certs")
        if self.api_key and not self.allow_insecure and not is_loopback(_host(address)):
            raise ConfigError(
                f"the API key would be sent to {address} unencrypted; give --ssl-ca-certs, or "
                "--allow-insecure if the connection is protected in another way"
            )
        return None


def _names(called: Callable[[str, Flag], str | None]) -> dict[str, str]:
    return {
        flag.typed(name): called(name, flag) or name
        for name, (_, flag) in flags_of(Credentials).items()
    }


def _is_set(variable: str | None) -> bool:
    """True if a setting comes from this variable: a flag takes precedence."""
    flags = (flag.typed(name) for name, (_, flag) in flags_of(Credentials).items()
             if flag.env == variable)  # fmt: skip
    typed = {argument.partition("=")[0] for argument in sys.argv}
    return variable is not None and variable in os.environ and typed.isdisjoint(flags)


def _host(address: str) -> str:
    return address.rpartition("/")[2].rpartition(":")[0]
