"""More draft models beside a stack that this command started: a draft service for each.

They are drafters of the stack by the name that they were given, such as for `--grid drafter=...`.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from flyspec.errors import ConfigError, FlyspecError
from flyspec.flags import Flag

if TYPE_CHECKING:
    from flyspec.cli.service import Child
    from flyspec.cli.stack import Stack
    from flyspec.values.admin import DrafterStatus

T = TypeVar("T")

_KIND = "model"
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
    """Return the result of `work`, done while the stack has the drafters.

    Raises why if one of their services dies meanwhile, since other drafters would take its place.
    """
    try:
        if not drafts:
            return await work
        async with _added(stack, drafts):
            return await stack.guard(work)
    finally:
        work.close()


@asynccontextmanager
async def _added(stack: Stack, drafts: DraftModels) -> AsyncIterator[None]:
    """Start a draft service for each model and register it. Raises `ConfigError`."""
    from flyspec.client import AdminClient
    from flyspec.progress import working

    children: dict[str, Child] = {}
    try:
        async with AdminClient(stack.admin_address) as admin:
            known = [drafter.name for drafter in await admin.list_drafters()]
            for name, model in drafts:
                if name in known:
                    raise ConfigError(f"--draft {name}={model}: the stack has a drafter {name!r}")
                with working(f"starting the draft model {name}"):
                    child = await _started(stack, model)
                    children[f"draft model {name}"] = child
                    try:
                        await child.ready()
                        port = child.facts["port"]
                        await admin.register_drafter(name, f"127.0.0.1:{port}", _KIND)
                    except FlyspecError as error:
                        raise ConfigError(f"--draft {name}={model}: {error}") from error
        stack.services |= children
        yield
    finally:
        for name in children:
            stack.services.pop(name, None)
        await _end(list(children.values()), stack.options.drain_grace_s)


async def _started(stack: Stack, model: str) -> Child:
    from flyspec.cli.service import Child
    from flyspec.cli.stack import torch_threads

    options = replace(stack.options, draft_model=model, draft_port=0, drafter="").resolved()
    threads = options.draft_threads or torch_threads()
    return await Child.start("draft", "draft_service", options.flags("draft"), threads, _ignore)


def _ignore(_: str) -> None: ...


async def _end(children: Sequence[Child], grace_s: float) -> None:
    for child in children:
        child.send(signal.SIGTERM)
    ends = [asyncio.ensure_future(child.process.wait()) for child in children]
    if ends:
        await asyncio.wait(ends, timeout=grace_s + 2.0)
    for child in children:
        child.send(signal.SIGKILL)
        await child.ended()


async def drafters_of(stack: Stack | None) -> list[DrafterStatus]:
    """Return a stack's drafters, the active one first; of one that runs elsewhere, none.

    Those tell only their operators.
    """
    from flyspec.client import AdminClient

    if stack is None:
        return []
    async with AdminClient(stack.admin_address) as admin:
        return await admin.list_drafters()
