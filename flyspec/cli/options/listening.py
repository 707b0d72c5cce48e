"""Flags of the generation and admin ports of a stack on this machine: TLS and API keys."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

_SECURITY = "Who may connect"


@dataclass(frozen=True)
class ListeningFlags:
    """What the orchestrator, which alone may listen beyond loopback, is told of security."""

    ssl_certfile: Annotated[
        str, typer.Option(help="PEM file of its certificate.", rich_help_panel=_SECURITY)
    ] = ""
    ssl_keyfile: Annotated[
        str, typer.Option(help="PEM file of its key.", rich_help_panel=_SECURITY)
    ] = ""
    ssl_ca_certs: Annotated[
        str,
        typer.Option(
            help="PEM file of the authorities of clients' certificates.", rich_help_panel=_SECURITY
        ),
    ] = ""
    ssl_client_auth: Annotated[
        Literal["required", "none"] | None,
        typer.Option(
            help="Whether clients of the generation port must show a certificate.",
            show_default="required if there is --ssl-ca-certs",
            rich_help_panel=_SECURITY,
        ),
    ] = None
    admin_ssl_client_auth: Annotated[
        Literal["required", "none"] | None,
        typer.Option(
            help="The same of the admin port.",
            show_default="required if there is --ssl-ca-certs",
            rich_help_panel=_SECURITY,
        ),
    ] = None
    api_keys_file: Annotated[
        str,
        typer.Option(help="TOML file of API keys (`flyspec keys new`).", rich_help_panel=_SECURITY),
    ] = ""
    allow_insecure: Annotated[
        bool,
        typer.Option(
            "--allow-insecure",
            help="Let others than this machine connect in the clear.",
            rich_help_panel=_SECURITY,
        ),
    ] = False

    def orchestrator_flags(self) -> tuple[str, ...]:
        """As the orchestrator takes them."""
        found: list[str] = []
        for field in fields(self):
            value: Any = getattr(self, field.name)
            flag = "--" + field.name.replace("_", "-")
            if value is True:
                found.append(flag)
            elif value:
                is_file = field.name.endswith(("file", "certs"))
                found += [flag, str(Path(value).expanduser().resolve()) if is_file else value]
        return tuple(found)
