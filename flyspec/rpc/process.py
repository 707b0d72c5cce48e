"""A service as a process: says where it listens, waits for SIGTERM, ends with a message."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from collections.abc import Coroutine
from typing import Any

import uvloop

from flyspec.errors import FlyspecError


def announce(ready_fd: int | None, facts: dict[str, Any]) -> None:
    """Tell the process that started this one where it listens: one JSON line on `ready_fd`."""
    if ready_fd is not None:
        with os.fdopen(ready_fd, "w") as pipe:
            pipe.write(json.dumps(facts) + "\n")


def settle_memory() -> None:
    """Keep what loading left behind out of garbage collections, which would hold up a round."""
    gc.collect()
    gc.freeze()


async def wait_for_termination() -> None:
    """Wait for SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a service's main coroutine on uvloop; an error for the user is one line, exit code 2."""
    try:
        uvloop.run(main)
    except FlyspecError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
