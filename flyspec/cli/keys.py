"""`flyspec keys`: API keys for the orchestrator's clients and operators."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Annotated

import typer

from flyspec.cli.options import with_flags
from flyspec.flags import Flag
from flyspec.values.generation import SERVERS

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _group() -> None:
    """API keys."""


@app.command("new")
@with_flags
def new(
    name: Annotated[str, typer.Argument(help="Whose key it is; in logs and limits.")],
    scope: Annotated[
        Sequence[str], Flag("generate or admin; repeatable.", default="generate")
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
    days: Annotated[float | None, Flag("Days of validity.", min=0, default="for good")] = None,
    json: Annotated[bool, Flag("Print one JSON document.")] = False,
) -> None:
    """Make a key: print it, which nothing else ever does, and what to add to the server's file."""
    from flyspec.cli.runtime import print_json
    from flyspec.security.keys import ApiKey, Scope, entry_of, new_key

    if unknown := set(scope) - set(Scope):
        raise typer.BadParameter(f"--scope {unknown.pop()}: there are {', '.join(Scope)}")
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
    print(f"the key, for {name} alone; it is shown this once:\n\n{key}\n")
    print(
        f"add this to the file of --api-keys-file, which the orchestrator reads again:\n\n{entry}"
    )
