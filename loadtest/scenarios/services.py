"""Services on this machine that a scenario kills or stops."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from flyspec.client import Status, UpstreamStatus
from flyspec.errors import ConfigError, FlyspecError
from loadtest.scenarios.base import World

TARGET, DRAFTER = "verify", "draft"
RESTART_S = 120.0
"""So long may a service take to be restarted by whoever watches over it."""
LOOK_S = 0.1


def process_of(world: World, name: str) -> UpstreamStatus:
    """Return the service of that name in `--watch`, as the orchestrator sees it.

    Raises `ConfigError`. Only named processes are ever killed: one on another machine may have
    the same id.
    """
    pid = world.sampler.pids.get(name)
    for upstream in _upstreams(world.operator.status(), name):
        if upstream.process.process_id == pid:
            return upstream
    raise ConfigError(f"--watch {name}=PID: needed, with the process id of a {name} service")


def kill(world: World, name: str) -> tuple[float, float]:
    """Kill a service; return when, and when its successor at the same address was ready."""
    before = process_of(world, name)
    killed = world.now()
    world.killed.add(before.address)
    os.kill(before.process.process_id, signal.SIGKILL)
    world.note(f"{name} is killed")
    while world.now() < killed + RESTART_S:
        world.sleep(LOOK_S)
        for after in _upstreams(world.operator.status(), name):
            again = after.process.instance_id not in ("", before.process.instance_id)
            if after.address == before.address and after.ready and again:
                world.sampler.pids[name] = after.process.process_id
                world.note(f"{name} is back")
                return killed, world.now()
    raise FlyspecError(f"the killed {name} service was not restarted within {RESTART_S:g} s")


@contextmanager
def held(world: World, name: str) -> Iterator[None]:
    """Stop a service, which then hangs."""
    pid = process_of(world, name).process.process_id
    os.kill(pid, signal.SIGSTOP)
    world.note(f"{name} hangs")
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
        world.note(f"{name} continues")


def _upstreams(status: Status, name: str) -> Sequence[UpstreamStatus]:
    return status.targets if name == TARGET else status.drafters
