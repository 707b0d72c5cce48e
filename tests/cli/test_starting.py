"""The start of a stack: the fork server, its stages, an end before it has started."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest
from rich.console import Console

from flyspec.cli.fork_server import ForkServer, can_fork
from flyspec.cli.service import ROOT, Child, child_environment
from flyspec.cli.stack import Stack
from flyspec.cli.starting import StartProgress
from flyspec.startup import READY
from tests.waiting import is_gone, until


@asynccontextmanager
async def fork_server():
    server = ForkServer()
    await server.start(child_environment(1))
    try:
        yield server
    finally:
        await server.close()


async def launched(server: ForkServer, said: list[str], imports: tuple[str, ...] = ()) -> Child:
    return await Child.launch("draft", 1, said.append, imports, server)


async def test_children_are_processes_of_their_own() -> None:
    said: list[str] = []
    async with fork_server() as server:
        first, second = [await launched(server, said, ("json", "no.such.module")) for _ in "ab"]
        first.run("json.tool", ["--help"], {})
        second.run("json.tool", ["--no-such-flag"], {})
        assert await first.ended() == 0
        assert await second.ended() == 2
        assert first.pid != second.pid
        assert any("json" in line for line in said)
        third = await launched(server, said)
        assert await until(lambda: third.pid)
        assert os.getpgid(third.pid) == third.pid  # so that its own children can be killed
        third.send(signal.SIGKILL)
        assert await third.ended() == -signal.SIGKILL


async def test_children_end_with_their_server_and_with_their_parent() -> None:
    async with fork_server() as server:
        waiting = await launched(server, [])
        assert await until(lambda: waiting.pid)
        pid = waiting.pid
    assert await waiting.ended() == -signal.SIGKILL
    assert await until(lambda: is_gone(pid))
    async with fork_server() as server:
        orphan = await launched(server, [])
        assert await until(lambda: orphan.pid)
        os.close(orphan.stdin)
        orphan.stdin = -1
        assert await asyncio.wait_for(orphan.ended(), 30) == 0


def test_what_may_use_an_accelerator_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_fork(["cpu", "cpu"])
    monkeypatch.setattr("pathlib.Path.glob", lambda *_: iter(["/dev/nvidia0"]))
    assert can_fork(["cpu"])
    assert not can_fork(["auto", "cpu"])


async def test_services_of_a_stack_are_told_apart(stack: Stack) -> None:
    pids = {name: service.pid for name, service in stack.services.items()}
    assert len({*pids.values()}) == 3
    assert all(service.facts["metrics_port"] for service in stack.services.values())


def test_the_stage_of_each_service_is_shown() -> None:
    start = StartProgress()
    start.stage("verify", "importing")
    start.stage("verify", "reading weights")
    start.stage("draft", READY)
    console = Console(width=80, record=True)
    console.print(start)
    lines = console.export_text().splitlines()
    assert re.match(r"verify service +reading weights +\d+\.\d s", lines[0])
    assert lines[1].split() == ["draft", "service", READY]


IMPORTING = """
import time
from flyspec.startup import end_on_sigterm

end_on_sigterm()
print("importing", flush=True)
try:  # as libraries do around what is optional
    time.sleep(60)
except BaseException:
    time.sleep(60)
"""


def test_an_import_that_catches_everything_does_not_outlive_sigterm() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", IMPORTING], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"importing\n"
    child.send_signal(signal.SIGTERM)
    _, errors = child.communicate(timeout=30)
    assert child.returncode == 128 + signal.SIGTERM
    assert errors == b""
