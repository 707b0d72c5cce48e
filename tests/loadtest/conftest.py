"""The bundled models in their own processes, and load tests as child processes.

Locust patches the standard library, which must not reach other tests.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from loadtest.protocols import TRANSPORTS, ProtocolName


@dataclass
class Ended:
    """A load test that has ended: exit code, what it printed, what it wrote."""

    code: int
    printed: str
    errors: str
    document: dict[str, Any] = field(default_factory=dict)
    page: str = ""

    def phase(self, name: str) -> dict[str, Any]:
        phase = next(p for p in self.document["phases"] if p["name"] == name)
        return {**phase, **phase["figures"]}

    def check(self, name: str) -> dict[str, Any]:
        return next(c for c in self.document["checks"] if c["name"] == name)


@pytest.fixture(scope="session")
async def load_stack():
    """A stack with few slots, so that a test's load can fill them."""
    options = StackOptions(
        log_level="warning", max_sessions=6, http_port=0,
        orchestrator_flags=("--max-waiting", "2"),
    )  # fmt: skip
    async with Stack(options) as running:
        yield running


_FIRST, *_OTHERS = TRANSPORTS


@pytest.fixture(params=[_FIRST, *(pytest.param(p, marks=pytest.mark.full) for p in _OTHERS)])
def protocol(request):
    """Each protocol in turn."""
    return request.param


def address_of(stack, protocol):
    """Where a stack speaks a protocol."""
    return {"grpc": stack.address, "http": stack.http_url}[protocol]


@pytest.fixture
def run_load(load_stack, tmp_path):
    """Run `python -m loadtest` against that stack; SIGTERM ends it once `stop_when` returns."""

    async def run(
        scenario: str,
        flags: str = "",
        stop_when: Callable[[], Awaitable[None]] | None = None,
        module: str = "loadtest",
        page: bool = False,
        protocol: ProtocolName = "grpc",
    ) -> Ended:
        html, data = tmp_path / "load.html", tmp_path / "load.json"
        where = [] if module != "loadtest" else [
            "--address", address_of(load_stack, protocol),
            "--admin-address", load_stack.admin_address,
            "--watch", f"verify={load_stack.services['verify'].pid}",
        ]  # fmt: skip
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, scenario, *where, "--protocol", protocol,
            "--output", str(data),
            *(["--html", str(html)] if page else []), *flags.split(),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        if stop_when is not None:
            assert child.stderr is not None
            while b" for " not in (line := await child.stderr.readline()):  # a phase has begun
                assert line, "it ended before it began"
            await stop_when()
            child.terminate()
        printed, errors = await child.communicate()
        ended = Ended(child.returncode or 0, printed.decode(), errors.decode())
        if data.exists():
            ended.document = json.loads(data.read_text())
            ended.page = html.read_text() if page else ""
        return ended

    return run
