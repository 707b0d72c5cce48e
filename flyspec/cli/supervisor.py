"""Keeps the stack of `flyspec serve` whole: a service that dies is started again.

Generations go on meanwhile: without a drafter they decode plainly, for their target they wait
(`--reopen-timeout-s`). Those of an orchestrator that dies end with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn

from flyspec.cli.stack import Stack, all_or_first_error
from flyspec.errors import FlyspecError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Before a service is started that died again soon; doubled each time."""
STABLE_S = 60.0
"""A service that lived so long is started again at once."""
MOST_FAILED_STARTS = 5
"""In a row, of the target or the orchestrator. A drafter is tried for ever: all works without."""


async def supervise(
    stack: Stack, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """Start again what dies, until cancelled. Raises why target or orchestrator do not come up."""
    await all_or_first_error([_keep(stack, name, sleep) for name in stack.services])


async def _keep(stack: Stack, name: str, sleep: Callable[[float], Awaitable[None]]) -> NoReturn:
    now = asyncio.get_running_loop().time
    failed_starts, pause_s = 0, 0.0
    while True:
        since = now()
        how = await stack.services[name].how_it_ended()
        if now() - since >= STABLE_S:
            pause_s = 0.0
        when = f"in {pause_s:.0f} s" if pause_s else "now"
        stack.say(f"{how}; it is started again {when}")
        await sleep(pause_s)
        pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * pause_s))
        try:
            await stack.restart(name)
            failed_starts = 0
        except FlyspecError:
            failed_starts += 1
            if failed_starts == MOST_FAILED_STARTS and name != "draft":
                raise
