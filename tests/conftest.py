"""Settings for all tests."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings

# A shell lets what it runs in the background ignore interrupts, and children do as their parents.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes depends on what else the machine does. `--hypothesis-profile` names
# another of the two; `tests.examples` is for properties whose examples are many or expensive.
settings.register_profile(
    "short", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("full", settings.get_profile("short"), max_examples=1000)
settings.load_profile("short")


def pytest_runtest_teardown(item):
    """Locust replaces sockets and threads: imported here, it would break whatever runs next."""
    assert "locust" not in sys.modules, f"{item.nodeid} imported locust into the tests' process"


@pytest.fixture(scope="session", autouse=True)
def forked_servers():
    """The fork servers of all stacks are forked by one process: each would import torch again."""
    from flyspec.cli.child import ChildJob
    from flyspec.cli.fork_server import READY_FD, ForkServer
    from flyspec.cli.service import MODEL_IMPORTS, child_environment

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    first = []

    def start_first():
        if not first:
            command = [sys.executable, "-P", "-m", "flyspec.cli.fork_server", str(theirs.fileno())]
            environment = child_environment(1)
            first.append(subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment))

    class Forked(ForkServer):
        async def start(self, environment):
            start_first()
            with suppress(BlockingIOError):
                while ours.recv(1 << 16, socket.MSG_DONTWAIT):
                    pass  # what became of others
            job, self._lifeline = os.pipe()
            with self.connection() as end:
                request = json.dumps({"child": 0, "imports": MODEL_IMPORTS})
                socket.send_fds(ours, [request.encode()], [job, 2, end.fileno()])
            os.close(job)
            child = ChildJob("flyspec.cli.fork_server", [str(READY_FD)], environment)
            os.write(self._lifeline, child.to_line())

        async def close(self):
            await super().close()
            os.close(self._lifeline)

    with ours, theirs, mock.patch("flyspec.cli.stack.ForkServer", Forked):
        yield Forked
        for process in first:
            process.kill()
            process.wait()


@pytest.fixture
async def fork_server(forked_servers):
    """Forks services, as `Child.start` has them do."""
    server = forked_servers()
    await server.start({})
    yield server
    await server.close()


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory):
    """A random target and draft model with one tokenizer that sometimes agree."""
    from tests.tiny import make_model  # torch, which few tests of a file alone need

    base = tmp_path_factory.mktemp("models")
    return (
        str(make_model(base / "target", seed=3)),
        str(make_model(base / "draft", seed=3, hidden_size=64)),
    )


@pytest.fixture
def default_ports():
    """Wait until no connection of another test has one of the ports that commands use by default.

    The system gives them to outgoing connections, and keeps them for a minute after.
    """
    from flyspec import config
    from flyspec.preflight.ports import port_problem

    ports = (config.GENERATION_PORT, config.DRAFT_PORT, config.VERIFY_PORT, config.ADMIN_PORT)
    until = time.monotonic() + 120
    while problems := {port: said for port in ports if (said := port_problem("127.0.0.1", port))}:
        assert time.monotonic() < until, problems
        time.sleep(1)
