"""`flyspec drafters`: what the orchestrator drafts with, and swapping it while it serves."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from flyspec.cli.options import with_flags
from flyspec.credentials import Credentials
from flyspec.flags import Flag

if TYPE_CHECKING:
    from flyspec.client import AdminClient, DrafterStatus

T = TypeVar("T")

AdminAddress = Annotated[str, Flag("Admin port of the orchestrator.")]
Json = Annotated[bool, Flag("Print one JSON document.")]
Name = Annotated[str, typer.Argument(help="Name that requests ask for.")]
_ADMIN = "127.0.0.1:50053"

app = typer.Typer(help="The drafters of a running stack.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """The drafters of a running stack."""


@app.command("list")
@with_flags
def list_drafters(
    connection: Credentials, admin_address: AdminAddress = _ADMIN, json: Json = False
) -> None:
    """Show the drafters: who gets work, and how well each one drafts."""
    drafters = _do(admin_address, connection, lambda admin: admin.list_drafters())
    if json:
        _print({"drafters": [_document(d) for d in drafters]})
    else:
        _table(drafters)


@app.command("register")
@with_flags
def register(
    connection: Credentials,
    name: Name,
    address: Annotated[
        str,
        Flag(
            "Address of its draft service: host:port, replicas separated by commas, or "
            "dns:///host:port for every address of a name."
        ),
    ],
    kind: Annotated[
        str, Flag("Kind: model, prompt_lookup or multi_level; empty is the service's default.")
    ] = "",
    admin_address: AdminAddress = _ADMIN,
    json: Json = False,
) -> None:
    """Try a drafter, and add it: requests can name it from now on. A known name gets a replica."""
    drafter, probe_ns = _do(
        admin_address, connection, lambda admin: admin.register_drafter(name, address, kind)
    )
    if json:
        _print({"drafter": _document(drafter), "probe_ns": probe_ns})
    else:
        _table([drafter])
        print(f"its proposal on trial took {probe_ns / 1e6:.1f} ms")


@app.command("activate")
@with_flags
def activate(
    connection: Credentials,
    name: Name,
    share: Annotated[
        float | None,
        Flag(
            "Share of new generations, as a canary; 0 ends it. Without it: all of them, and "
            "running ones move over."
        ),
    ] = None,
    admin_address: AdminAddress = _ADMIN,
    json: Json = False,
) -> None:
    """Give a drafter the generations that name none, or a share of them."""
    _show(_do(admin_address, connection, lambda admin: admin.activate_drafter(name, share)), json)


@app.command("drain")
@with_flags
def drain(
    connection: Credentials,
    name: Name,
    wait: Annotated[float, Flag("Seconds to wait for its generations to leave.", min=0)] = 10.0,
    admin_address: AdminAddress = _ADMIN,
    json: Json = False,
) -> None:
    """Give a drafter nothing new; its generations move on at their next round."""
    _show(_do(admin_address, connection, lambda admin: admin.drain_drafter(name, wait)), json)


@app.command("remove")
@with_flags
def remove(
    connection: Credentials,
    name: Name,
    force: Annotated[bool, typer.Option(help="Even if generations use it.")] = False,
    admin_address: AdminAddress = _ADMIN,
    json: Json = False,
) -> None:
    """Forget a drafter that is drained."""
    _do(admin_address, connection, lambda admin: admin.remove_drafter(name, force))
    if json:
        _print({"removed": name})
    else:
        print(f"{name} is removed")


def _do(address: str, connection: Credentials, call: Callable[[AdminClient], Awaitable[T]]) -> T:
    """Ask the admin port."""
    from flyspec.cli.runtime import run_async
    from flyspec.client import AdminClient

    async def ask() -> T:
        async with AdminClient(address, connection) as admin:
            return await call(admin)

    return run_async(ask())


def _print(document: dict[str, Any]) -> None:
    from flyspec.cli.runtime import print_json

    print_json(document)


def _document(drafter: DrafterStatus) -> dict[str, Any]:
    """A drafter for `--json`: enums by name, and what follows from the counts."""
    document = dataclasses.asdict(drafter)
    document["state"] = drafter.state.name
    for replica, status in zip(document["replicas"], drafter.replicas, strict=True):
        replica["breaker"] = status.breaker.name
    stats = drafter.stats
    document["stats"] |= {
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "mean_accepted_tokens": stats.mean_accepted_tokens,
        "mean_proposal_ms": stats.mean_proposal_ms,
        "tokens_per_s": stats.tokens_per_s,
    }
    return document


def _show(drafter: DrafterStatus, json: bool) -> None:
    if json:
        _print({"drafter": _document(drafter)})
    else:
        _table([drafter])


def _table(drafters: list[DrafterStatus]) -> None:
    """Print drafters."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    columns = ("name", "state", "usable", "kind", "model", "address", "running", "rounds",
               "accepted", "tokens a round", "proposal")  # fmt: skip
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == "name")
    for d in drafters:
        stats = d.stats
        model = f"{d.model.name} ({d.model.num_parameters / 1e6:.1f} M)" if d.model else "-"
        state = d.state.name.lower() + (f" {d.share:.0%}" if d.share else "")
        drafted = bool(stats.num_spec_steps)
        table.add_row(
            d.name,
            state,
            "yes" if d.usable else f"no: {d.reason}",
            d.kind,
            f"{model}, translated" if d.translated else model,
            d.address or "here",
            str(stats.active_generations),
            str(stats.num_spec_steps),
            f"{stats.draft_acceptance_rate:.0%}" if drafted else "-",
            f"{stats.mean_accepted_tokens:.2f}" if drafted else "-",
            f"{stats.mean_proposal_ms:.1f} ms" if drafted else "-",
        )
    Console().print(table)
