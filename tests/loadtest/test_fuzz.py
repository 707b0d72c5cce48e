"""Fuzzing finds a mistake of each kind; its scripts come from seeds that set every field."""

from __future__ import annotations

import signal
from contextlib import asynccontextmanager
from functools import partial
from random import Random

import pytest

from flyspec.cli.service import Child
from loadtest.fuzz import run
from loadtest.fuzz.mutate import mistake, parts
from loadtest.fuzz.seeds import Facts
from loadtest.fuzz.servers import Server
from loadtest.fuzz.source import SERVICES, Source

FACTS = Facts(400, 256, 64, ("model", "prompt_lookup"), range(13, 21), "127.0.0.1:1")
FAST = {"BATCH": 20, "PATIENCE_S": 2.0, "SETTLE_S": 1.0, "SHRINK_S": 5.0}


@asynccontextmanager
async def planted(name, on_log):
    """The draft service with a mistake, in a process of its own."""
    flags = ["--port", "0", "--log-level", "warning", "--idle-timeout-s", "2"]
    child = await Child.start(
        "draft", "tests.loadtest.planted", flags, 1, on_log, {"PLANTED": name}
    )
    await child.ready()
    server = Server("draft", {"draft": f"127.0.0.1:{child.facts['port']}"}, {"draft": child})
    try:
        yield await server.attach()
    finally:
        await server.close()
        child.send(signal.SIGKILL)
        await child.ended()


@pytest.mark.parametrize(
    ("name", "text", "steps"),
    [
        ("internal", "status INTERNAL: internal error in DraftService.Draft", 1),
        ("no_message", "status INVALID_ARGUMENT without a message", 1),
        ("accepted", "status OK", 2),
        ("no_answer", "status no answer", None),
        ("died", "a call that kills it", None),
        ("traceback", "the log says", None),
        ("tokens", "the canary: got", None),
        ("sessions", "sessions left", None),
        ("memory", None, None),
    ],
)
async def test_a_mistake_of_each_kind_is_found(name, text, steps, monkeypatch):
    for constant, value in FAST.items():
        monkeypatch.setattr(run, constant, value)
    report = await run.fuzz(partial(planted, name), 700, 1)
    assert not report.passed
    if text is None:
        (growth,) = report.growth
        assert growth.share * growth.mib > 32
        return
    found = [f for f in report.findings.values() if f.text.startswith(text)]
    assert found, str(report)
    if steps:
        script = found[0].script
        assert len(script.steps) == steps, str(report)
        advance = script.method.request.FromString(script.steps[-1]).advance
        assert advance.max_tokens > 64 or advance.min_confidence != advance.min_confidence
        assert len(advance.ListFields()) == 1


def fields_of(kind, seen):
    if kind.full_name not in seen and not kind.GetOptions().map_entry:
        seen.add(kind.full_name)
        for field in kind.fields:
            yield field.full_name
            yield from fields_of(field.message_type, seen) if field.message_type else ()


def fields_set(message):
    for field, _ in message.ListFields():
        yield field.full_name
        for part in parts(message, field):
            yield from fields_set(part)


@pytest.mark.parametrize("name", SERVICES)
def test_every_field_of_every_request_is_set_in_a_seed(name):
    """A field without a valid value would only ever be changed to a bad one."""
    source = Source(name, FACTS)
    messages = [m for sessions in source.sessions.values() for session in sessions for m in session]
    assert not [m for m in messages if mistake(m)]
    there, seen = {f for m in messages for f in fields_set(m)}, set()
    all_ = {f for method in source.sessions for f in fields_of(method.request.DESCRIPTOR, seen)}
    # Where they name the model, they are the server's own.
    own = {"flyspec.v1.VerifyOpen.weights_fingerprint", "flyspec.v1.VerifyOpen.numerics"}
    assert all_ - there - own == set()


@pytest.mark.parametrize("name", SERVICES)
def test_a_seed_makes_the_same_scripts_again(name):
    first, second = Source(name, FACTS), Source(name, FACTS)
    for index in range(200):
        assert first.script(Random(index)) == second.script(Random(index))
