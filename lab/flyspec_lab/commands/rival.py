"""The rival of an evaluation: a smaller model alone, on a stack of its own."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from flyspec.addresses import address_problem
from flyspec.cli.stack import Stack
from flyspec.config import GENERATION_PORT
from flyspec.credentials import Credentials
from flyspec.errors import ConfigError

if TYPE_CHECKING:
    from flyspec_lab.run import ServedModel

DRAFT = "draft"
"""As `--rival`: the draft model."""


def is_address(text: str) -> bool:
    return not address_problem(text, "generation", GENERATION_PORT)


async def served_rival(
    resources: AsyncExitStack, rival: str | None, stack: Stack | None, connection: Credentials
) -> ServedModel | None:
    """Return the stack that serves the rival; started here, unless it is an address."""
    from flyspec.cli.starting import shown
    from flyspec.client import AsyncClient
    from flyspec.progress import error_console
    from flyspec_lab.run import ServedModel

    if rival is None:
        return None
    if is_address(rival):
        client = AsyncClient(rival, credentials=connection, max_retries=0)
        client.hint = "give another --rival"
    else:
        assert stack is not None
        model = stack.options.draft_model if rival == DRAFT else rival
        if not model:
            raise ConfigError(f"--rival {DRAFT}: there is no draft model; set --draft-model")
        second = Stack(stack.options.with_target(model).on_free_ports(draft_model=""))
        await resources.enter_async_context(shown(second, error_console()))
        client = AsyncClient(second.address, max_retries=0)
    await resources.enter_async_context(client)
    return ServedModel(client, (await client.list_models()).target)
