"""A service as a process, from its settings to its end: what all three have in common."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

import uvloop

from flyspec import rpc
from flyspec.errors import FlyspecError
from flyspec.telemetry import Telemetry, configure_logging
from flyspec.telemetry.service import Settings

log = logging.getLogger(__name__)


class Loaded(Protocol):
    """A service that is loaded."""

    async def start(self) -> dict[str, int]:
        """Listen and be ready; the ports, by the names that they are announced with."""

    async def stop(self, grace_s: float) -> None:
        """Let calls end for `grace_s` seconds, then end, whether or not it has started."""


@dataclass(frozen=True)
class OnePort:
    """A service that is one server; `close` ends what works behind it."""

    server: rpc.GrpcServer
    close: Callable[[], None]

    async def start(self) -> dict[str, int]:
        """Listen and be ready."""
        port = await self.server.start()
        await self.server.set_ready(True)
        return {"port": port}

    async def stop(self, grace_s: float) -> None:
        """Drain and close."""
        await self.server.stop(grace_s)
        await asyncio.to_thread(self.close)


async def serve(
    name: str, settings: Settings, load: Callable[[Telemetry], Awaitable[Loaded]]
) -> None:
    """Load a service, start it, serve until SIGTERM or SIGINT, drain it.

    `load` takes what it takes: until it returns, SIGTERM does what `flyspec.startup` says. Raises
    `FlyspecError` when the service cannot start.
    """
    configure_logging(name, settings.log_level, settings.log_format)
    with closing(Telemetry(name, settings)) as telemetry:
        metrics_port = telemetry.listen()
        running = await load(telemetry)
        settle_memory()
        grace_s = 0.0
        try:
            termination = asyncio.create_task(_wait_for_termination())
            starting = asyncio.create_task(running.start())
            await asyncio.wait({termination, starting}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                return
            ports = starting.result()
            others = (
                f", {k.removesuffix('_port')} on {v}" for k, v in ports.items() if k != "port"
            )
            log.info("listening on %s:%d%s", settings.host, ports["port"], "".join(others))
            if settings.ready_fd is not None:
                with os.fdopen(settings.ready_fd, "w") as pipe:  # who started us waits for this
                    pipe.write(json.dumps({**ports, "metrics_port": metrics_port}) + "\n")
            await termination
            log.info("draining")
            grace_s = settings.drain_grace_s
        finally:
            await running.stop(grace_s)


def settle_memory() -> None:
    """Keep what loading left behind out of garbage collections, which would hold up a round."""
    gc.collect()
    gc.freeze()


async def _wait_for_termination() -> None:
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
