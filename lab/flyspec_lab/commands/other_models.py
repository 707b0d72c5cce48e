"""Models beside a stack that a command started: further draft models, and the rival.

A draft model gets a draft service, and is a drafter of the stack by the name that it was given,
such as for `--grid drafter=...`. The rival of an evaluation is a smaller model alone, on a stack of
its own.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from flyspec.errors import ConfigError, FlyspecError
from flyspec.flags import Flag

if TYPE_CHECKING:
    from flyspec.cli.stack import Stack
    from flyspec.values.admin import DrafterStatus
    from flyspec_lab.run import ServedModel

T = TypeVar("T")

DRAFT = "draft"
"""As `--rival`: the draft model."""
DraftModels = Sequence[tuple[str, str]]


def read_drafts(texts: Sequence[str]) -> DraftModels:
    """Parse NAME=MODEL texts. Raises `ValueError`."""
    found: list[tuple[str, str]] = []
    for text in texts:
        name, equals, model = text.partition("=")
        if not (name and equals and model):
            raise ValueError(f"{text!r}: must be NAME=MODEL, such as small=models/draft")
        if name in dict(found):
            raise ValueError(f"{text!r}: {name!r} is there twice")
        found.append((name, model))
    return tuple(found)


Drafts = Annotated[DraftModels, Flag(
    "Another draft model (a directory or hub id) for the stack, and the name of its drafter; "
    "repeatable.", metavar="NAME=MODEL", read=read_drafts, default="none", name="--draft",
)]  # fmt: skip


async def with_added_drafters(stack: Stack, drafts: DraftModels, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, done once the stack has the drafters, a service for each.

    They end with the stack. Raises `ConfigError` if one does not start, and why if one dies
    meanwhile, since other drafters would take its place.
    """
    try:
        for name, model in drafts:
            await _add(stack, name, model)
        return await (stack.guard(work) if drafts else work)
    finally:
        work.close()


async def _add(stack: Stack, name: str, model: str) -> None:
    """Start a draft service, which becomes one of the stack's, and register it."""
    from flyspec.cli.service import Child
    from flyspec.cli.stack import torch_threads
    from flyspec.client import AdminClient
    from flyspec.progress import working

    if name in [drafter.name for drafter in await drafters_of(stack)]:
        raise ConfigError(f"--draft {name}={model}: the stack has a drafter {name!r}")
    options = replace(stack.options, draft_model=model, draft_port=0, drafter="").resolved()
    threads, flags = options.draft_threads or torch_threads(), options.flags("draft")
    with working(f"starting the draft model {name}"):
        child = await Child.start(
            "draft", "draft_service", flags, threads, lambda _: None, stack.fork_server
        )
        stack.services[f"draft model {name}"] = child
        try:
            await child.ready()
            async with AdminClient(stack.admin_address) as admin:
                await admin.register_drafter(name, f"127.0.0.1:{child.facts['port']}", "model")
        except FlyspecError as error:
            raise ConfigError(f"--draft {name}={model}: {error}") from error


async def drafters_of(stack: Stack | None) -> list[DrafterStatus]:
    """Return a stack's drafters, the active one first; of one that runs elsewhere, none.

    Those tell only their operators.
    """
    from flyspec.client import AdminClient

    if stack is None:
        return []
    async with AdminClient(stack.admin_address) as admin:
        return await admin.list_drafters()


async def served_rival(
    resources: AsyncExitStack, rival: str | None, stack: Stack | None
) -> ServedModel | None:
    """Return a stack that serves the rival, started here."""
    from flyspec.cli.stack import Stack
    from flyspec.cli.starting import shown
    from flyspec.client import AsyncClient
    from flyspec.progress import error_console
    from flyspec_lab.run import ServedModel

    if rival is None:
        return None
    assert stack is not None
    model = stack.options.draft_model if rival == DRAFT else rival
    if not model:
        raise ConfigError(f"--rival {DRAFT}: there is no draft model; set --draft-model")
    options = replace(
        stack.options, model=model, draft_model="", autojudge_file=None, heads=None,
        port=0, admin_port=0, draft_port=0, verify_port=0,
    )  # fmt: skip
    second = Stack(options)
    await resources.enter_async_context(shown(second, error_console()))
    client = await resources.enter_async_context(AsyncClient(second.address, max_retries=0))
    return ServedModel(client, (await client.list_models()).target)
