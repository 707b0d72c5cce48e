"""`flyspec drafters`: what the orchestrator can draft with."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from flyspec.client import DrafterStatus

app = typer.Typer(help="The drafters of a running stack.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """The drafters of a running stack."""


@app.command("list")
def list_drafters(
    admin_address: Annotated[
        str, typer.Option(help="Admin port of the orchestrator.")
    ] = "127.0.0.1:50053",
    json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Show the drafters that requests can name."""
    from flyspec.cli.runtime import print_json, run_async

    drafters = run_async(_list(admin_address))
    if json:
        print_json({"drafters": [dataclasses.asdict(d) for d in drafters]})
        return
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for column in ("name", "default", "usable", "model", "address"):
        table.add_column(column, overflow="fold", no_wrap=column == "name")
    for d in drafters:
        table.add_row(
            d.name,
            "yes" if d.active else "",
            "yes" if d.usable else f"no: {d.reason}",
            f"{d.model.name} ({d.model.num_parameters / 1e6:.1f} M)" if d.model else "-",
            d.address,
        )
    Console().print(table)


async def _list(admin_address: str) -> list[DrafterStatus]:
    from flyspec.client import AdminClient

    async with AdminClient(admin_address) as admin:
        return await admin.list_drafters()
