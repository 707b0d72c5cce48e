"""Shell completion of rules and drafters. Imports gRPC only to ask a server for its drafters."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer

from flyspec.errors import FlyspecError
from flyspec.rules.presets import RULE_PRESETS

DEADLINE_S = 0.5
"""For a server to name its drafters; without an answer there are none."""
_ALL = "all"

Completer = Callable[[typer.Context, str], list[str]]


def _beginning(names: Sequence[str], text: str) -> list[str]:
    return [name for name in names if name.startswith(text)]


def _listed(known: Callable[[typer.Context], Sequence[str]], text: str, ctx: Any) -> list[str]:
    """Complete the last of several names, with commas between them."""
    before, comma, last = text.rpartition(",")
    given = before.split(",")
    names = [name for name in known(ctx) if name not in given]
    return [f"{before}{comma}{name}" for name in _beginning(names, last)]


def complete_rule(ctx: typer.Context, incomplete: str) -> list[str]:
    return _beginning([*RULE_PRESETS], incomplete)


def complete_rules(ctx: typer.Context, incomplete: str) -> list[str]:
    return _listed(lambda _: [*RULE_PRESETS, _ALL], incomplete, ctx)


def complete_drafters(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete drafters that requests can name, as the server at `--address` knows them."""
    return _listed(_drafters, incomplete, ctx)


def complete_registered(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete drafters that operators can name, asked at `--admin-address`."""
    return _beginning(_registered(ctx), incomplete)


def _drafters(ctx: typer.Context) -> Sequence[str]:
    from flyspec.client import DEFAULT_ADDRESS, AsyncClient

    async def ask() -> Sequence[str]:
        address = ctx.params.get("address") or DEFAULT_ADDRESS
        async with AsyncClient(address, max_retries=0) as client:
            return (await client.list_models(DEADLINE_S)).drafters

    return _asked(ask)


def _registered(ctx: typer.Context) -> Sequence[str]:
    from flyspec.client import DEFAULT_ADMIN_ADDRESS, AdminClient

    async def ask() -> Sequence[str]:
        async with AdminClient(ctx.params.get("admin_address") or DEFAULT_ADMIN_ADDRESS) as admin:
            return [drafter.name for drafter in await admin.list_drafters()]

    return _asked(ask)


def _asked(ask: Callable[[], Any]) -> Sequence[str]:
    with contextlib.suppress(FlyspecError, TimeoutError, OSError):
        return asyncio.run(asyncio.wait_for(ask(), DEADLINE_S))
    return ()


COMPLETERS: Mapping[str, Completer] = {
    "--rule": complete_rule,
    "--rules": complete_rules,
    "--drafter": complete_drafters,
}
"""By flag, in all commands that have it."""
