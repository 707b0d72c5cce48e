"""A service as a process, from its settings to its end: what all three have in common."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, Protocol

import uvloop

from flyspec import rpc
from flyspec.errors import FlyspecError, ModelLostError
from flyspec.telemetry import Telemetry, configure_logging
from flyspec.telemetry.service import Settings

log = logging.getLogger(__name__)

EXIT_LOST = os.EX_TEMPFAIL
"""Exit code of a service whose model is lost: it wants to be started again."""
LOST_GRACE_S = 1.0
"""In which the others of such a service hear of it."""
LOST_END_S = 5.0
"""After which it ends however far it is: a thread or a device may hang."""


class Loaded(Protocol):
    """A service that is loaded. `lost` has a reason once it had better be started again."""

    @property
    def lost(self) -> Future[str] | None:
        """None for a service without a model."""

    async def start(self) -> dict[str, int]:
        """Listen and be ready; the ports, by the names that they are announced with."""

    async def stop(self, grace_s: float) -> None:
        """Let calls end for `grace_s` seconds, then end, whether or not it has started."""


@dataclass(frozen=True)
class OnePort:
    """A service that is one server; `close` ends what works behind it, `lost` or not."""

    server: rpc.GrpcServer
    close: Callable[[], None]
    lost: Future[str] | None = None

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
    with ExitStack() as cleanup:
        telemetry = cleanup.enter_context(closing(Telemetry(name, settings)))
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
            lost = asyncio.ensure_future(_lost(running))
            await asyncio.wait({termination, lost}, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                grace_s = min(settings.drain_grace_s, LOST_GRACE_S)
                end = threading.Timer(LOST_END_S, os._exit, [EXIT_LOST])
                end.daemon = True
                cleanup.callback(end.cancel)
                end.start()
                await lost
            lost.cancel()
            log.info("draining")
            grace_s = settings.drain_grace_s
        finally:
            await running.stop(grace_s)


async def _lost(running: Loaded) -> None:
    """Wait until the service's model is lost, and raise why."""
    # Shielded: who waits no longer does not cancel what tells of the model.
    reason = await asyncio.shield(asyncio.wrap_future(running.lost or Future()))
    raise ModelLostError(f"the model is lost, and the process ends to be started again: {reason}")


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
    """Run a service's main coroutine on uvloop; an error for the user is one line, exit code 2.

    `EXIT_LOST` where the same command may work when it is run again.
    """
    try:
        uvloop.run(main)
    except ModelLostError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        logging.shutdown()
        os._exit(EXIT_LOST)  # the interpreter's own end may wait for a thread that hangs
    except FlyspecError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
