"""The life of a service process, from settings to shutdown; shared by all three services."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any, Protocol

import uvloop

from flyspec import rpc
from flyspec.errors import FlyspecError, ModelLostError
from flyspec.spelling import respell
from flyspec.startup import STAGE, reporting_stages
from flyspec.telemetry import Telemetry, configure_logging
from flyspec.telemetry.service import Settings

log = logging.getLogger(__name__)

EXIT_LOST = os.EX_TEMPFAIL
"""Exit code of a service that lost its model and should be restarted."""
LOST_GRACE_S = 1.0
"""Maximum seconds that such a service drains, for its callers to learn of the loss."""
LOST_END_S = 5.0
"""Seconds after which it exits regardless, since a thread or a device may hang."""


class Loaded(Protocol):
    """A loaded service."""

    @property
    def lost(self) -> Future[str] | None:
        """Resolves to the reason when the model is lost; None for a service without a model."""

    @property
    def missing(self) -> Mapping[str, str]:
        """Parts that are missing though the service is ready, with the reasons."""

    async def start(self) -> dict[str, int]:
        """Listen and become ready. Return the ports by the names they are announced under."""

    async def stop(self, grace_s: float) -> None:
        """Give calls `grace_s` seconds to finish, then stop; also before `start` has finished."""


@dataclass(frozen=True)
class OnePort:
    """A service with one server; `close` stops its workers, whether `lost` or not."""

    server: rpc.GrpcServer
    close: Callable[[], None]
    lost: Future[str] | None = None
    missing: Mapping[str, str] = field(default_factory=dict)

    async def start(self) -> dict[str, int]:
        port = await self.server.start()
        await self.server.set_ready(True)
        return {"port": port}

    async def stop(self, grace_s: float) -> None:
        await self.server.stop(grace_s)
        await asyncio.to_thread(self.close)


async def serve(
    name: str, settings: Settings, load: Callable[[Telemetry], Awaitable[Loaded]]
) -> None:
    """Load a service, start it, serve until SIGTERM or SIGINT, then drain it.

    Until `load` returns, SIGTERM is handled by `flyspec.startup`. Raises `FlyspecError` when the
    service cannot start.
    """
    configure_logging(name, settings.log_level, settings.log_format)
    announce = _announcer(settings.ready_fd)
    with ExitStack() as cleanup:
        cleanup.enter_context(reporting_stages(lambda doing: announce({STAGE: doing})))
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
            missing = dict(running.missing)
            if missing:
                without = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
                log.warning("ready without %s", without)
            announce({**ports, "metrics_port": metrics_port, "missing": missing})
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


def _announcer(descriptor: int | None) -> Callable[[Mapping[str, Any]], None]:
    """Return what tells the process that started this one, which waits for the ports."""
    if descriptor is None:
        return lambda _: None
    pipe = os.fdopen(descriptor, "w", buffering=1)

    def announce(message: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):
            pipe.write(json.dumps(message) + "\n")

    return announce


async def _lost(running: Loaded) -> None:
    """Wait until the service's model is lost, and raise why."""
    # Shielded, so that cancelling this wait does not cancel the service's future.
    reason = await asyncio.shield(asyncio.wrap_future(running.lost or Future()))
    raise ModelLostError(f"the model is lost; exiting so that the process is restarted: {reason}")


def settle_memory() -> None:
    """Exclude the objects left by loading from garbage collections, which would delay a round."""
    gc.collect()
    gc.freeze()


async def _wait_for_termination() -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()


def run(main: Coroutine[Any, Any, None], names: Mapping[str, str] | None = None) -> None:
    """Run a service's main coroutine on uvloop; a user error prints one line and exits with code 2.

    `names` are those of the settings that were not set by flags (`environment_names`).
    The code is `EXIT_LOST` where running the same command again may work.
    """
    try:
        uvloop.run(main)
    except ModelLostError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        logging.shutdown()
        os._exit(EXIT_LOST)  # a normal exit could wait for a thread that hangs
    except FlyspecError as error:
        print(f"error: {respell(str(error), names or {})}", file=sys.stderr)
        raise SystemExit(2) from None
