"""Fuzzing finds a mistake of each kind; its scripts come from seeds that set every field."""

from __future__ import annotations

import signal
from contextlib import asynccontextmanager
from functools import partial
from random import Random

import pytest

from flyspec.cli.service import Child
from flyspec_lab.report import PageResults
from loadtest.fuzz import report, run, servers
from loadtest.fuzz.calls import Do, Script, shrunk
from loadtest.fuzz.mutate import mistake, parts
from loadtest.fuzz.seeds import Facts
from loadtest.fuzz.servers import Server
from loadtest.fuzz.source import SERVICES, ScriptSource

FACTS = Facts(
    400, 256, 64, ("model", "prompt_lookup"), range(13, 21), "127.0.0.1:1", heads=("head",)
)
FAST = {
    "BATCH": 50, "CONCURRENT": 4, "PATIENCE_S": 3.0, "ANSWER_S": 1.0, "SETTLE_S": 2.0,
    "SHRINK_S": 3.0,
}  # fmt: skip


@asynccontextmanager
async def planted(name, on_log):
    """The draft service with a mistake, in a process of its own."""
    flags = ["--port", "0", "--log-level", "warning", "--idle-timeout-s", "1.5"]
    child = await Child.start(
        "draft", "tests.loadtest.planted", flags, 1, on_log, {"PLANTED": name}
    )
    await child.ready()
    try:
        address = f"127.0.0.1:{child.facts['port']}"
        async with Server("draft", {"draft": address}, {"draft": child}) as server:
            yield server
    finally:
        child.send(signal.SIGKILL)
        await child.ended()


@pytest.mark.parametrize(
    ("name", "text", "steps"),
    [
        ("internal", "status INTERNAL: internal error in DraftService.Draft", 1),
        ("no_message", "status INVALID_ARGUMENT without a message", 1),
        ("accepted", "status OK", 2),
        ("hangs", "a call that kills it", None),
        ("dies", "a call that kills it", None),
        ("traceback", "the log says", None),
        ("tokens", "the canary: got", None),
        ("sessions", "sessions left", None),
        ("memory", None, None),
    ],
)
async def test_a_mistake_of_each_kind_is_found(name, text, steps, monkeypatch, tmp_path, capsys):
    for constant, value in FAST.items():
        monkeypatch.setattr(run, constant, value)
    if steps:  # a busy machine shortens slowly
        monkeypatch.setattr(run, "SHRINK_S", 30.0)
    # The log tells of an internal error, too, and of those whose status was lost.
    monkeypatch.setattr(report, "MAX_FINDINGS", 10 if name == "internal" else 1)
    monkeypatch.setattr(servers, "LONG", servers.LONG[:5])
    result = await run.fuzz(partial(planted, name), 6000 if name == "accepted" else 2000, 0, print)
    files = PageResults(html=tmp_path / "fuzz.html", output=tmp_path / "fuzz.json")
    assert files.finish(report.fuzz_report([result], {"seed": 0})) == 1
    assert "FAILED" in capsys.readouterr().out
    checks = "\n".join(check["said"] for check in result.checks())
    if text is None:
        assert [c["name"] for c in result.checks() if not c["passed"]] == ["draft, memory of draft"]
        return
    found = [f for f in result.findings.values() if f.text.startswith(text)]
    assert found, checks
    if steps:
        script = found[0].script
        assert len(script.steps) == steps, checks
        advance = script.method.request.FromString(script.steps[-1]).advance
        assert advance.max_tokens > 64 or advance.min_confidence != advance.min_confidence
        assert len(advance.ListFields()) <= 2


async def test_a_call_whose_end_waits_behind_answers_is_shortened():
    """What follows the mistake meets the end of the call, however long it waits for it."""
    method = next(m for m in ScriptSource("draft", FACTS).sessions if m.path.endswith("/Draft"))
    requests = [
        {"open": {"token_ids": [5, 6, 7, 8]}},
        {"advance": {"round_id": 1, "keep_length": 4, "max_tokens": 4}},
        {"advance": {"round_id": 2, "keep_length": 4, "max_tokens": 65}},
        {"advance": {"round_id": 3, "keep_length": 4, "max_tokens": 4}},
    ]
    *steps, last = [method.request(**request).SerializeToString() for request in requests]
    script = Script(method, "", (*steps, Do.PAUSE, last))
    async with planted("no_message", print) as server:
        shows = partial(run.FuzzRun(server, 0, [])._shows, "INVALID_ARGUMENT")
        smallest = await shrunk(script, shows, 30.0)
    assert smallest.steps == (method.request(advance={"max_tokens": 65}).SerializeToString(),)


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
    source = ScriptSource(name, FACTS)
    messages = [m for sessions in source.sessions.values() for session in sessions for m in session]
    assert not [m for m in messages if mistake(m)]
    there, seen = {f for m in messages for f in fields_set(m)}, set()
    all_ = {f for method in source.sessions for f in fields_of(method.request.DESCRIPTOR, seen)}
    # Where they name the model, they are the server's own.
    facts = "weights_fingerprint", "numerics", "judge_fingerprint"
    own = {f"flyspec.v1.VerifyOpen.{fact}" for fact in facts}
    assert all_ - there - own == set()


@pytest.mark.parametrize("name", SERVICES)
def test_a_seed_makes_the_same_scripts_again(name):
    first, second = ScriptSource(name, FACTS), ScriptSource(name, FACTS)
    for index in range(200):
        assert first.script(Random(index)) == second.script(Random(index))
