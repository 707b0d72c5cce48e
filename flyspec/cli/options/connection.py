"""Flags of commands that speak to a running server: API key and certificates."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from flyspec.client import Credentials

_CONNECTION = "Connection to a running server"


@dataclass(frozen=True)
class ConnectionFlags:
    """What the command shows to the server, and what it asks of it."""

    api_key: Annotated[
        str,
        typer.Option(
            help="API key. Others on this machine see flags: better in the environment.",
            envvar="FLYSPEC_API_KEY",
            show_default=False,
            rich_help_panel=_CONNECTION,
        ),
    ] = ""
    ssl_ca_certs: Annotated[
        str,
        typer.Option(
            help="Speak TLS; PEM file of the authorities of the server's certificate, or 'system'.",
            envvar="FLYSPEC_SSL_CA_CERTS",
            show_default=False,
            rich_help_panel=_CONNECTION,
        ),
    ] = ""
    ssl_certfile: Annotated[
        str,
        typer.Option(
            help="PEM file of a certificate to show.",
            envvar="FLYSPEC_SSL_CERTFILE",
            show_default=False,
            rich_help_panel=_CONNECTION,
        ),
    ] = ""
    ssl_keyfile: Annotated[
        str,
        typer.Option(
            help="PEM file of its key.",
            envvar="FLYSPEC_SSL_KEYFILE",
            show_default=False,
            rich_help_panel=_CONNECTION,
        ),
    ] = ""
    ssl_target_name: Annotated[
        str,
        typer.Option(
            help="Name in the server's certificate.",
            envvar="FLYSPEC_SSL_TARGET_NAME",
            show_default="that of the address",
            rich_help_panel=_CONNECTION,
        ),
    ] = ""
    allow_insecure: Annotated[
        bool,
        typer.Option(
            "--allow-insecure",
            help="Send the API key in the clear, to other machines too.",
            rich_help_panel=_CONNECTION,
        ),
    ] = False

    def credentials(self) -> Credentials:
        """For the client."""
        from flyspec.client import Credentials

        return Credentials(**asdict(self))
