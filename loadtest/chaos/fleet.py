"""Replicas of the services on this machine, each behind a proxy, and one orchestrator."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flyspec.bundled import DRAFT, DRAFT_BYTES, TARGET
from flyspec.cli.fork_server import ForkServer, can_fork
from flyspec.cli.service import Child, child_environment
from flyspec.cli.stack_options import LOOPBACK
from flyspec_lab.ports import free_port
from loadtest.proxy import Proxy

FOREIGN_DRAFTER = "bytes"
END_TIMEOUT_S = 60.0
"""Longer than a service's grace period to drain."""
COMMON = ["--log-level", "error", "--drain-grace-s", "4"]
Role = Literal["target", "drafter", "orchestrator"]
MODULES = {
    "target": "verify_service", "drafter": "draft_service", "orchestrator": "orchestrator",
}  # fmt: skip


class Replica:
    """A service as a child process with the same `port` after every restart, behind a `proxy`.

    `lock` is held while a fault is injected. A `server` forks the process, if it runs.
    """

    child: Child

    def __init__(self, name: str, role: Role, flags: Sequence[str], server: ForkServer) -> None:
        self.name, self.role, self.port, self._server = name, role, free_port(), server
        self.proxy = Proxy(LOOPBACK, self.port)
        self.lock = asyncio.Lock()
        self._flags = [*flags, "--port", str(self.port), *COMMON]

    async def start(self, illness: Sequence[str] = (), flags: Sequence[str] = ()) -> None:
        """Start the process, with more `flags`; `child.ready` waits for it.

        `illness` makes its model fail: kind and calls of `loadtest.chaos.sick_service`.
        """
        # The last flag of a name wins.
        module, arguments = MODULES[self.role], [*self._flags, *flags]
        if illness:
            module, arguments = "loadtest.chaos.sick_service", [*illness, module, *arguments]
        self.child = await Child.start(self.name, module, arguments, 1, _log, self._server)

    async def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Signal it and wait for its end. Raises `TimeoutError` if it does not end."""
        self.child.send(how)
        await asyncio.wait_for(self.child.ended(), END_TIMEOUT_S)

    async def restart(self, illness: Sequence[str] = (), flags: Sequence[str] = ()) -> None:
        """Kill it, start it again as `start` does, and wait until it is ready."""
        await self.end()
        await self.start(illness, flags)
        await self.child.ready()


@dataclass
class Fleet:
    """Two targets, drafters, and an orchestrator."""

    targets: list[Replica]
    drafters: list[Replica]
    orchestrator: Replica

    @property
    def replicas(self) -> list[Replica]:
        """The services behind the orchestrator."""
        return [*self.targets, *self.drafters]


@asynccontextmanager
async def proxied_fleet(small: bool) -> AsyncIterator[Fleet]:
    """Start a fleet: two targets, two drafters, and one of bytes unless it is `small`."""
    async with AsyncExitStack() as exits:
        # A start, of which a fault takes one or two, would import torch again.
        server = ForkServer()
        if can_fork(["auto"]):
            await server.start(child_environment(1))
        exits.push_async_callback(server.close)

        async def started(role: Role, name: str, model: Path) -> Replica:
            limits = ["--threads", "1", "--max-sessions", "64", "--step-timeout-s", "5"]
            replica = Replica(name, role, ["--model", str(model), *limits], server)
            await replica.proxy.start()
            exits.push_async_callback(replica.proxy.close)
            await replica.start()
            exits.push_async_callback(replica.end)
            return replica

        targets = [await started("target", f"target {i}", TARGET) for i in (1, 2)]
        drafters = [await started("drafter", f"drafter {i}", DRAFT) for i in (1, 2)]
        foreign = [] if small else [await started("drafter", "drafter of bytes", DRAFT_BYTES)]
        for replica in (*targets, *drafters, *foreign):
            await replica.child.ready()
        orchestrator = Replica("orchestrator", "orchestrator", [
            "--admin-port", "0",
            "--verify-address", ",".join(r.proxy.address for r in targets),
            "--draft-address", ",".join(r.proxy.address for r in drafters),
            "--drafters", "".join(f"{FOREIGN_DRAFTER}={r.proxy.address}" for r in foreign),
            "--draft-timeout-s", "1" if small else "2",
            "--round-timeout-s", "10", "--reopen-timeout-s", "110",
            "--probe-interval-s", "1", "--probe-timeout-s", "1.5",
        ], server)  # fmt: skip
        await orchestrator.start()
        exits.push_async_callback(orchestrator.end)
        await orchestrator.child.ready()
        yield Fleet(targets, [*drafters, *foreign], orchestrator)


def _log(line: str) -> None:
    """Print a line of a service's log without disturbing a report."""
    print(f"  {line}", file=sys.stderr)
