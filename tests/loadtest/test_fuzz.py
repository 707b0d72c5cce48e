"""Fuzzing finds a mistake of each kind; its scripts set every field of every request."""

from __future__ import annotations

import signal
from contextlib import asynccontextmanager
from random import Random

import pytest

from flyspec.cli.fork_server import ForkServer
from flyspec.cli.service import Child, child_environment
from loadtest.fuzz import run
from loadtest.fuzz.run import FuzzRun
from loadtest.fuzz.scripts import Mutator, ScriptSource, is_map, mistake, paths
from loadtest.fuzz.sessions import FILES, Facts

PLANTED = "tests.loadtest.planted"
FACTS = Facts(400, 256, 64, ("model", "prompt_lookup"), range(13, 21), "127.0.0.1:1")
FAST = {"BATCH": 50, "CONCURRENT": 4, "PATIENCE_S": 3.0, "ANSWER_S": 1.0, "SETTLE_S": 2.0}


@pytest.fixture(scope="module")
async def server():
    """Forks processes that have imported what the draft service needs."""
    server = ForkServer()
    await server.start(child_environment(1))
    yield server
    await server.close()


@asynccontextmanager
async def planted(server, name):
    """A run against the draft service with a mistake, in a process of its own."""
    log = []
    flags = ["--port", "0", "--log-level", "warning", "--idle-timeout-s", "1.5"]
    child = await Child.launch("draft", 1, log.append, [PLANTED], server)
    child.run(PLANTED, flags, {"PLANTED": name})
    await child.ready()
    try:
        addresses = {"draft": f"127.0.0.1:{child.facts['port']}"}
        async with FuzzRun("draft", addresses, {"draft": child}, log=log) as fuzz:
            yield fuzz
    finally:
        child.send(signal.SIGKILL)
        await child.ended()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("internal", "status INTERNAL: internal error in DraftService.Draft"),
        ("no_message", "status INVALID_ARGUMENT without a message"),
        ("accepted", "status OK"),
        ("hangs", "the server hangs"),
        ("dies", "the draft service ended with code 3"),
        ("traceback", "the log says"),
        ("tokens", "the canary: got"),
        ("sessions", "sessions left"),
        ("memory", "draft, memory of draft"),
    ],
)
async def test_a_mistake_of_each_kind_is_found(server, name, text, monkeypatch):
    for constant, value in FAST.items():
        monkeypatch.setattr(run, constant, value)
    async with planted(server, name) as fuzz:
        for calls in range(50, 6001, 50):
            await fuzz.run(calls)
            broken = [check.name for check in fuzz.checks() if not check.passed]
            told = [*broken, *(found for found, _ in fuzz.findings.values())]
            if any(found.startswith(text) for found in told):
                return
    raise AssertionError(told)


def holds(message, path):
    """True if the field at a path is set."""
    for field in path:
        value = getattr(message, field.name)
        if not (len(value) if field.is_repeated else field in [f for f, _ in message.ListFields()]):
            return False
        message = value[-1] if field.is_repeated and not is_map(field) else value
    return True


@pytest.mark.parametrize("name", FILES)
def test_every_field_is_set_and_a_seed_makes_the_same_scripts_again(name):
    source, again, rng = ScriptSource(name, FACTS), ScriptSource(name, FACTS), Random(0)
    messages = [m for sessions in source.sessions.values() for session in sessions for m in session]
    assert not [m for m in messages if mistake(m)]
    for index in range(50):
        assert source.script(Random(index)) == again.script(Random(index))
    mutator = Mutator((400, 256, 64), ("exact", "model"))
    for method in source.sessions:
        for path in paths(method.request.DESCRIPTOR):
            changed = [method.request() for _ in range(12)]
            for message in changed:
                mutator.change(message, path, rng)
            assert any(holds(message, path) for message in changed), path[-1].full_name
