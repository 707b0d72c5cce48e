"""Services that can be killed, held and drained, and come back where they were."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
from collections.abc import Callable, Sequence

from flyspec.cli.service import Child
from flyspec.errors import FlyspecError
from loadtest.sampler import resident_mib

END_TIMEOUT_S = 60.0
"""A service drains within its grace period, which is shorter."""


def free_port() -> int:
    """A port of this machine that nobody listens at.

    It is below those that the system gives to connections, of which others make many: so it
    stays free until somebody listens, and also while the one that listened starts again.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class Restartable:
    """A service as a child process. `lives` counts its restarts; `running` is false meanwhile.

    `port` is where it listens, in all its lives.
    """

    def __init__(
        self,
        name: str,
        module: str,
        flags: list[str],
        threads: int,
        on_log: Callable[[str], None],
    ) -> None:
        self.name = name
        self._module, self._flags, self._threads, self._on_log = module, flags, threads, on_log
        self._service: Child | None = None
        self.port = free_port()
        self.lives = 0
        self.running = False

    @property
    def service(self) -> Child:
        """The process of its present life."""
        assert self._service is not None, f"{self.name} was never started"
        return self._service

    @property
    def resident_mib(self) -> float | None:
        """Resident memory, while it runs."""
        return resident_mib(self.service.pid) if self.running else None

    async def spawn(self, illness: Sequence[str] = (), flags: Sequence[str] = ()) -> Child:
        """Start the process, `ready` waits for it; with more `flags`, and as a sick one if told so.

        `illness` are kind and calls of `bench.sick_service`.
        """
        # The last flag of a name wins.
        arguments = [*self._flags, "--port", str(self.port), *flags]
        module = self._module
        if illness:
            module, arguments = "bench.sick_service", [*illness, module, *arguments]
        self._service = await Child.start(self.name, module, arguments, self._threads, self._on_log)
        return self._service

    async def ready(self) -> None:
        """Wait until it serves. Raises why it ended instead."""
        await self.service.ready()
        self.running = True

    async def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Signal it and wait for its end. Raises `FlyspecError` if that does not come."""
        self.running = False
        self.service.send(how)
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await self.service.ended()
        except TimeoutError:
            raise FlyspecError(
                f"the {self.name} service did not end within {END_TIMEOUT_S:g} s of {how.name}"
            ) from None

    async def restart(
        self,
        how: signal.Signals = signal.SIGKILL,
        illness: Sequence[str] = (),
        flags: Sequence[str] = (),
    ) -> None:
        """End it and start it again, as `spawn` does; returns when it serves."""
        await self.end(how)
        self.lives += 1
        await self.spawn(illness, flags)
        await self.ready()
