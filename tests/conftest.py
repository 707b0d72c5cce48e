"""Settings for all tests."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
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
async def one_fork_server():
    """Services of all stacks are forked by one server: each stack's own would import torch again.

    Not those of a stack in another event loop or with other environment variables.
    """
    from flyspec.cli.fork_server import ForkServer
    from tests.waiting import until

    loop, shared, known = asyncio.get_running_loop(), ForkServer(), {}

    class Reusing:
        def __init__(self):
            self._server, self._forked = shared, []

        async def start(self, environment):
            asked = {k: v for k, v in environment.items() if k != "PYTEST_CURRENT_TEST"}
            if asyncio.get_running_loop() is not loop or (known or asked) != asked:
                self._server = ForkServer()
            if not self._server.running:
                await self._server.start(environment)
            if self._server is shared:
                known.update(asked)

        @property
        def running(self):
            return self._server.running

        def fork(self, *request):
            self._forked.append(self._server.fork(*request))
            return self._forked[-1]

        async def close(self):
            if self._server is not shared:
                await self._server.close()
                return
            for child in self._forked:
                await until(lambda child=child: child.pid or child.returncode is not None)
                child.send_signal(signal.SIGKILL)

    with mock.patch("flyspec.cli.stack.ForkServer", Reusing):
        yield
    await shared.close()


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
