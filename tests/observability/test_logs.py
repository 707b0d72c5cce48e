"""Machine-readable log lines, with a request's ID in those of all three services."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys

import grpc
import pytest

from flyspec.telemetry import fields, request_id_of, set_request_id
from flyspec.telemetry.logs import JsonFormatter, TextFormatter, errors_returned
from flyspec.v1 import generation_pb2, generation_pb2_grpc
from tests.observability.observed import SERVICES
from tests.waiting import until


def record(message, *arguments, level=logging.INFO, error=None, **extra):
    info = (type(error), error, error.__traceback__) if error else None
    made = logging.LogRecord("here", level, __file__, 1, message, arguments, info)
    made.__dict__.update(extra)
    return made


def test_a_json_line_is_one_object():
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        line = JsonFormatter("draft").format(
            record('it "failed"\n%s', "\u2028", error=error, **fields(tokens=3, name="ü"))
        )
    assert "\n" not in line
    assert "\u2028" not in line
    found = json.loads(line)
    assert found["message"] == 'it "failed"\n\u2028'
    assert found["level"] == "info"
    assert found["service"] == "draft"
    assert found["tokens"] == 3
    assert found["name"] == "ü"
    assert "ValueError: two" in found["exception"]
    assert found["time"].endswith("Z")
    assert "request_id" not in found


def test_a_client_that_disconnects_leaves_no_traceback():
    """grpc.aio logs one when a call's status cannot be sent."""
    code = (
        "import logging\n"
        "from grpc._cython.cygrpc import ExecuteBatchError\n"
        "from flyspec.telemetry.logs import configure_logging\n"
        "configure_logging('draft', 'info')\n"
        "for error in ExecuteBatchError('gone'), ValueError('wrong'):\n"
        "    try:\n"
        "        raise error\n"
        "    except Exception:\n"
        "        logging.getLogger('grpc._cython.cygrpc').exception('raised in core')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stderr.count("Traceback") == 1
    assert "ValueError: wrong" in ended.stderr


async def test_the_request_id_is_that_of_the_task():
    async def of(identifier):
        set_request_id(identifier)
        await asyncio.sleep(0)
        return json.loads(JsonFormatter("x").format(record("hello")))["request_id"]

    tasks = [asyncio.create_task(of(name)) for name in "ab"]
    assert await asyncio.gather(*tasks) == ["a", "b"]


def test_a_text_line_has_the_fields_after_the_message():
    line = TextFormatter("verify").format(record("done", **fields(tokens=3)))
    assert line.endswith(" verify INFO done tokens=3")


@pytest.mark.parametrize("end", ["\n", "\r", "\x0b", "\x85", "\u2028"])
def test_what_a_peer_sent_makes_no_line_of_its_own(end):
    sent = f"a{end}12:00:00 verify INFO fine\x1b[2K\x9b2K"
    line = TextFormatter("verify").format(record("refused: %s", sent, **fields(client=sent)))
    assert len(line.splitlines()) == 1
    assert not {"\x1b", "\x9b"} & {*line}


@pytest.mark.parametrize(
    ("client", "shown"),
    [
        ("team-a", "team-a"),
        ("10.0.0.0/24", "10.0.0.0/24"),
        ("ü", "ü"),
        ("a status=OK", '"a status=OK"'),
        ("a=b", '"a=b"'),
        ('"', '"\\""'),
        ("", '""'),
        ("a\u00a0b", '"a\\u00a0b"'),
        (None, "None"),
        (["a", 1], "\"['a', 1]\""),
    ],
)
def test_what_a_client_calls_itself_makes_no_field_of_its_own(client, shown):
    line = TextFormatter("x").format(record("request ended", **fields(client=client, status="OK")))
    assert line.endswith(f" request ended client={shown} status=OK")


def test_errors_returned_do_not_fill_the_log(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    for second in (1.5, 2.0, 7.9):
        monkeypatch.setattr("time.monotonic", lambda now=second: now)
        for _ in range(300):
            errors_returned.info("error", extra=fields(code=400))
    assert [r.fields.get("not_logged", 0) for r in caplog.records] == [
        *[0] * 10, *([290] + [0] * 9) * 2
    ]  # fmt: skip
    assert all(r.fields["code"] == 400 for r in caplog.records)


@pytest.mark.parametrize(
    ("value", "taken"),
    [
        ("abc-123", True),
        ("0f8fad5b-d9cb-469f-a165-70867728950e", True),
        ("a" * 128, True),
        ("a" * 129, False),
        ("", False),
        ("two words", False),
        ('x"}', False),
        ("x\n", False),
        (b"bytes", False),
    ],
)
def test_ids_that_clients_make_up_go_into_logs_only_if_they_can(value, taken):
    assert request_id_of((("x-request-id", value),)) == (value if taken else "")


async def generate(observed, metadata=()):
    # A fixed K: where it adapts, the drafter may not be asked.
    fixed = generation_pb2.Speculation(num_speculative_tokens=15)
    request = generation_pb2.GenerateRequest(
        text="def fibonacci(n):", max_tokens=8, speculation=fixed
    )
    async with grpc.aio.insecure_channel(observed.stack.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        messages = [m async for m in stub.Generate(request, metadata=metadata)]
    return messages[0].started.request_id


async def lines_of(observed, identifier):
    """Lines of a request, once it has ended and every service has said something."""

    def lines():
        return [json.loads(x) for x in observed.logs if f'"{identifier}"' in x]

    def all_said_something():
        ended = any(x["message"] == "request ended" for x in lines())
        return ended and {x["service"] for x in lines()} == set(SERVICES)

    await until(all_said_something)
    return lines()


async def test_a_requests_id_is_in_the_lines_of_all_services(observed):
    assert await generate(observed, (("x-request-id", "ticket:4711"),)) == "ticket:4711"
    found = await lines_of(observed, "ticket:4711")
    assert all(line["request_id"] == "ticket:4711" for line in found)
    (ended,) = [line for line in found if line["message"] == "request ended"]
    assert ended["service"] == "orchestrator"
    assert ended["status"] == "OK"
    assert ended["output_tokens"] == 8
    assert ended["total_ms"] >= ended["first_token_ms"] > 0


async def test_a_refused_request_is_one_line_with_the_reason(observed):
    request = generation_pb2.GenerateRequest(text="a", speculation={"drafter": "nobody"})
    metadata = (("x-request-id", "refused"), ("flyspec-client-id", "somebody"))
    async with grpc.aio.insecure_channel(observed.stack.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            _ = [m async for m in stub.Generate(request, metadata=metadata)]

    def said():
        lines = [json.loads(x) for x in observed.logs if '"refused"' in x]
        return [line for line in lines if line["level"] == "info"]

    (line,) = await until(said)
    assert line["message"] == "call ended with an error"
    assert line["method"] == "flyspec.v1.GenerationService/Generate"
    assert (line["code"], line["client"]) == ("NOT_FOUND", "id:somebody")
    assert "nobody" in line["reason"]


async def test_every_line_of_every_service_parses(observed):
    await generate(observed)
    for line in observed.logs:
        found = json.loads(line)
        assert {"time", "level", "service", "logger", "message"} <= set(found)
        assert found["service"] in SERVICES
        assert "fibonacci" not in line
