"""`flyspec keys`: API keys for the orchestrator's clients and operators."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Annotated

import typer

from flyspec.cli.json_output import print_json
from flyspec.cli.options import with_flags
from flyspec.flags import Flag
from flyspec.security.keys import ApiKey, Scope, entry_of, new_key
from flyspec.values.requests import SERVERS

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _group() -> None:
    """API keys."""


@app.command("new")
@with_flags
def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Owner of the key, for logs and limits.")
    ],
    scope: Annotated[
        Sequence[str], Flag("Scope: generate or admin; repeatable.", default="generate")
    ] = (),
    max_concurrent: Annotated[
        int | None, Flag("Maximum concurrent requests.", min=1, default=SERVERS)
    ] = None,
    max_requests_per_minute: Annotated[
        int | None, Flag("Maximum requests per minute.", min=1, default=SERVERS)
    ] = None,
    max_tokens_per_request: Annotated[
        int | None, Flag("Maximum prompt and output tokens per request.", min=1, default="no limit")
    ] = None,
    days: Annotated[float | None, Flag("Days of validity.", min=0, default="no expiry")] = None,
    json: Annotated[bool, Flag("Print one JSON document.")] = False,
) -> None:
    """Create a key; print it once, with the entry to add to the server's API keys file."""
    if unknown := set(scope) - set(Scope):
        raise typer.BadParameter(f"--scope {unknown.pop()}: must be one of {', '.join(Scope)}")
    now = datetime.datetime.now(datetime.UTC)
    owner = ApiKey(
        name=name,
        scopes=frozenset(map(Scope, scope or ["generate"])),
        max_concurrent=max_concurrent,
        max_requests_per_minute=max_requests_per_minute,
        max_tokens_per_request=max_tokens_per_request,
        expires=None if days is None else now + datetime.timedelta(days=days),
    )
    key = new_key()
    entry = entry_of(key, owner)
    if json:
        print_json({"key": key, "toml": entry})
        return
    print(f"API key for {name}; it will not be shown again:\n\n{key}\n")
    print(
        f"add this to the orchestrator's --api-keys-file, which is reloaded on change:\n\n{entry}"
    )
