"""Services that can be killed, stopped and drained, and restarted on the same port."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence

from flyspec.cli.service import Child
from flyspec.errors import FlyspecError
from loadtest.ports import free_port

END_TIMEOUT_S = 60.0
"""Longer than a service's grace period to drain."""


class Restartable:
    """A service as a child process that listens on the same `port` after every restart."""

    def __init__(
        self, name: str, module: str, flags: list[str], on_log: Callable[[str], None]
    ) -> None:
        self.name = name
        self.port = free_port()
        self._module, self._on_log = module, on_log
        self._flags = [*flags, "--port", str(self.port)]
        self._service: Child | None = None

    @property
    def service(self) -> Child:
        assert self._service is not None, f"{self.name} was never started"
        return self._service

    async def spawn(self, illness: Sequence[str] = (), flags: Sequence[str] = ()) -> None:
        """Start the process, with more `flags`; `service.ready` waits for it.

        `illness` makes its model fail: kind and calls of `loadtest.chaos.sick_service`.
        """
        module, arguments = self._module, [*self._flags, *flags]  # the last flag of a name wins
        if illness:
            module, arguments = "loadtest.chaos.sick_service", [*illness, module, *arguments]
        self._service = await Child.start(self.name, module, arguments, 1, self._on_log)

    async def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Signal it and wait for its end. Raises `FlyspecError` if it does not end."""
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
        """End it, start it again as `spawn` does, and wait until it is ready."""
        await self.end(how)
        await self.spawn(illness, flags)
        await self.service.ready()
