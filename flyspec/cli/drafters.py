"""`flyspec drafters`: show and change the orchestrator's drafters while it serves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from flyspec.cli.json_output import print_json
from flyspec.cli.options import read_admin_address, with_flags
from flyspec.cli.runtime import run_async, waiting
from flyspec.credentials import Credentials
from flyspec.flags import Flag

if TYPE_CHECKING:
    from flyspec.client import AdminClient, DrafterStatus

T = TypeVar("T")

_PREPARING = "a drafter with another tokenizer prepares the target's first"

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the drafter in requests.")]

app = typer.Typer(no_args_is_help=True)


@dataclass(frozen=True)
class _Admin(Credentials):
    """The admin port to call, and the output format."""

    admin_address: Annotated[str, Flag(
        "The orchestrator's admin address.", read=read_admin_address,
    )] = "127.0.0.1:50053"  # fmt: skip
    json: Annotated[bool, Flag("Print one JSON document.")] = False

    def ask(self, call: Callable[[AdminClient], Awaitable[T]]) -> T:
        from flyspec.client import AdminClient

        async def asked() -> T:
            async with AdminClient(self.admin_address, self) as admin:
                admin.hint = "pass --admin-address"
                return await call(admin)

        return run_async(asked())

    def show(self, drafter: DrafterStatus) -> None:
        if self.json:
            print_json({"drafter": drafter.document()})
        else:
            _table([drafter])


@app.callback()
def _group() -> None:
    """The drafters of a running stack."""


@app.command("list")
@with_flags
def list_drafters(admin: _Admin) -> None:
    """List drafters with their state, load and acceptance rate."""
    drafters = admin.ask(lambda client: client.list_drafters())
    if admin.json:
        print_json({"drafters": [d.document() for d in drafters]})
    else:
        _table(drafters)


@app.command("register")
@with_flags
def register(
    admin: _Admin,
    name: Name,
    address: Annotated[
        str,
        Flag(
            "Address of its draft service: host:port, comma-separated for replicas, or "
            "dns:///host:port for every address of a name."
        ),
    ],
    kind: Annotated[
        str, Flag("Kind: model, prompt_lookup or multi_level (empty: the service's default).")
    ] = "",
) -> None:
    """Test a drafter and add it, so that requests can name it. A known name gets a replica."""
    doing = f"testing {name} at {address}"
    drafter, probe_ns = admin.ask(
        lambda client: waiting(doing, _PREPARING, client.register_drafter(name, address, kind))
    )
    if admin.json:
        print_json({"drafter": drafter.document(), "probe_ns": probe_ns})
    else:
        _table([drafter])
        print(f"its test proposal took {probe_ns / 1e6:.1f} ms")


@app.command("activate")
@with_flags
def activate(
    admin: _Admin,
    name: Name,
    share: Annotated[
        float | None,
        Flag(
            "Fraction of new generations for a canary (0: end the canary). If not given: all "
            "generations, including running ones."
        ),
    ] = None,
) -> None:
    """Make a drafter the default, or a canary.

    It gets the generations that name no drafter, or with --share a fraction of them.
    """
    admin.show(admin.ask(lambda client: client.activate_drafter(name, share)))


@app.command("drain")
@with_flags
def drain(
    admin: _Admin,
    name: Name,
    wait: Annotated[float, Flag("Seconds to wait for its generations to leave.", min=0)] = 10.0,
) -> None:
    """Stop giving a drafter new generations.

    Its running ones move to another drafter at their next round.
    """
    admin.show(admin.ask(lambda client: client.drain_drafter(name, wait)))


@app.command("remove")
@with_flags
def remove(
    admin: _Admin,
    name: Name,
    force: Annotated[bool, typer.Option(help="Remove it even if generations use it.")] = False,
) -> None:
    """Remove a drained drafter."""
    admin.ask(lambda client: client.remove_drafter(name, force))
    if admin.json:
        print_json({"removed": name})
    else:
        print(f"{name} removed")


def _table(drafters: list[DrafterStatus]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    columns = ("name", "state", "usable", "kind", "model", "address", "running", "rounds",
               "accepted", "tokens per round", "proposal")  # fmt: skip
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
