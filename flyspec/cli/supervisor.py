"""Restarts services of `flyspec serve` that die.

Generations continue meanwhile: without a drafter they decode plainly, without a target they wait
(`--reopen-timeout-s`). If the orchestrator dies, its generations are lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn

from flyspec.cli.stack import Stack
from flyspec.concurrency import all_or_first_error
from flyspec.errors import FlyspecError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Seconds before restarting a service that soon died again; doubled each time."""
STABLE_S = 60.0
"""A service that ran for this many seconds is restarted at once."""
MOST_FAILED_STARTS = 5
"""Maximum in a row, for target and orchestrator; a drafter, being optional, is retried for ever."""


async def supervise(
    stack: Stack, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """Restart services that die, until cancelled. Raises if target or orchestrator cannot start."""
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
        stack.say(f"{how}; restarting {when}")
        await sleep(pause_s)
        pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * pause_s))
        try:
            await stack.restart(name)
            failed_starts = 0
        except FlyspecError:
            failed_starts += 1
            if failed_starts == MOST_FAILED_STARTS and name != "draft":
                raise
