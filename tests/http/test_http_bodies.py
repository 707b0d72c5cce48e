"""Bodies: who may send one, what it may have, and where it is converted."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from flyspec import json_text
from flyspec.errors import ResourceExhaustedError
from flyspec.json_text import MAX_PARTS
from orchestrator.front.http import options, reading, speculation
from orchestrator.front.http.bodies import ChatBody
from tests.http.clients import CHAT, SAID, client_of, connect, request
from tests.orchestrator.stacks import start_stack
from tests.waiting import until

TOO_MANY = f"the body: at most {MAX_PARTS} names, texts, lists and objects allowed"
TYPE = {"content-type": "application/json"}
MANY = [1] * 1025


async def refused(stack, sent: bytes) -> bytes:
    """Return what the server says to a request that never becomes whole."""
    reader, writer = await connect(stack)
    writer.write(sent)
    try:
        async with asyncio.timeout(20):
            return await reader.readuntil(b"\r\n")
    finally:
        writer.close()


def half(body, *headers: str) -> bytes:
    head, _, data = request(body).partition(b"\r\n\r\n")
    return b"\r\n".join([head, *map(str.encode, headers)]) + b"\r\n\r\n" + data[:10]


async def test_a_client_over_its_rate_is_refused_before_its_body(chat_dirs):
    options = {"max_requests_per_minute_per_client": 1}
    async with start_stack(chat_dirs, http_port=0, **options) as stack:
        asked = {"messages": SAID, "max_tokens": 1}
        async with client_of(stack) as client:
            assert (await client.post(CHAT, json=asked)).status_code == 200
        assert b" 429 " in await refused(stack, half(asked))


async def test_a_body_on_its_way_is_a_request_of_its_client_and_takes_nobodys_place(chat_dirs):
    options = {"max_concurrent_per_client": 1, "max_concurrent": 1, "max_waiting": 0}
    async with start_stack(chat_dirs, http_port=0, **options) as stack:
        asked = {"messages": SAID, "max_tokens": 1}
        async with client_of(stack) as client:

            async def code(name: str) -> int:
                headers = {"flyspec-client-id": name}
                return (await client.post(CHAT, json=asked, headers=headers)).status_code

            _, writer = await connect(stack)
            writer.write(half(asked, "flyspec-client-id: slow"))

            async def limited() -> bool:
                return await code("slow") == 429

            await until(limited)
            assert await code("other") == 200
            writer.close()

            async def free() -> bool:
                return await code("slow") == 200

            await until(free)
            reply = await client.post(
                CHAT, json={"messages": 3}, headers={"flyspec-client-id": "a"}
            )
            assert reply.status_code == 400
            assert await code("a") == 200  # what was refused is over


@pytest.mark.parametrize(
    ("field", "item"),
    [
        ("tools", "{}"), ("documents", "[]"), ("stop", '""'), ("messages", '{"role":"x"}'),
        ("frobnicate", '{"a":1}'), ("metadata", '""'),
    ],
)  # fmt: skip
async def test_many_parts_are_refused_before_any_is_built(bare, monkeypatch, field, item):
    monkeypatch.setattr(json_text, "json", None)  # nothing is built
    for after in ("]}", "", "{"):  # whatever follows
        body = f'{{"{field}":[' + ",".join([item] * MAX_PARTS) + after
        reply = await bare.post(CHAT, content=body, headers=TYPE)
        assert reply.status_code == 400
        assert TOO_MANY in reply.json()["error"]["message"]


async def test_texts_may_have_any_number_of_marks(bare):
    text = '[{",\\"' * MAX_PARTS
    reply = await bare.post(CHAT, json={"messages": SAID, "max_tokens": 1, "user": text})
    assert reply.status_code == 200


async def test_numbers_are_limited_beyond_a_context_of_token_ids(bare):
    reply = await bare.post("/detokenize", json={"tokens": [5] * (MAX_PARTS + 258)})
    assert f"at most {MAX_PARTS + 256} values" in reply.json()["error"]["message"]
    reply = await bare.post("/detokenize", content=b'{"tokens":[' + b"9" * 65 + b"]}", headers=TYPE)
    assert reply.status_code == 400


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"speculation": {"phases": [{}] * 17}}, "speculation.phases: at most 16 allowed, got 17"),
        ({"speculation": {"numDraftTokensPerRound": [1] * 257}}, "at most 256 allowed, got 257"),
        ({"speculation": {"phases": [{}, {"untilTokenIds": MANY}]}}, "phases[1].until_token_ids:"),
        (
            {"speculation": {"phases": [{"rule": {"guarded_token_ids": MANY}}]}},
            "speculation.phases[0].rule.guarded_token_ids: at most 1024 allowed",
        ),
        ({"speculation": {"exactInside": ["json"] * 3}}, "speculation.exact_inside: at most 2"),
        ({"stop_token_ids": MANY}, "stop_token_ids: at most 1024 allowed, got 1025"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias: at most 1024 allowed"),
        ({"metadata": {str(i): 1 for i in range(17)}}, "metadata: at most 16 allowed"),
    ],
)
async def test_every_list_has_a_limit_that_is_checked_first(bare, monkeypatch, body, message):
    refuse = lambda *_: pytest.fail("something was converted")  # noqa: E731
    monkeypatch.setattr(speculation.json_format, "ParseDict", refuse)
    reply = await bare.post(CHAT, json={"messages": SAID, **body})
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [{str(i): 1 for i in range(5000)}, {"messages": [{"role": 1}] * 5000}, {"tools": [1] * 5000}],
)
async def test_of_many_mistakes_one_is_told(bare, monkeypatch, body):
    told = []

    def count(problems, known):
        told.append(len(problems))
        return "x", None

    monkeypatch.setattr("orchestrator.front.http.errors._told", count)
    assert (await bare.post(CHAT, json=body)).status_code == 400
    assert told[0] <= 4


@pytest.mark.parametrize("count", [1, 400])
async def test_a_long_body_is_converted_where_nothing_waits_for_it(bare, monkeypatch, count):
    threads = set()

    def watched(work):
        def run(*given, **named):
            threads.add(threading.current_thread())
            return work(*given, **named)

        return run

    monkeypatch.setattr(reading, "read_json", watched(reading.read_json))
    monkeypatch.setattr(options, "options_with", watched(options.options_with))
    monkeypatch.setattr("orchestrator.front.http.app.chat_of", watched(options.chat_of))
    body = {"messages": [{"role": "user", "content": "x"}] * count, "max_tokens": 1}
    await bare.post(CHAT, json=body)
    assert (threads == {threading.current_thread()}) == (count == 1)
    assert len(threads) == 1


class Slow:
    """A request whose body comes piece by piece."""

    headers = TYPE

    def __init__(self) -> None:
        self.pieces: asyncio.Queue[bytes] = asyncio.Queue()

    async def stream(self):
        while piece := await self.pieces.get():
            yield piece


async def test_large_bodies_are_read_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr(reading, "LARGE_AT_ONCE", 2)
    monkeypatch.setattr(reading, "WAIT_S", 0.1)
    reader = reading.BodyReader(lambda: 256)
    kind = reading.TypeAdapter(ChatBody)
    body = json.dumps({"messages": SAID, "user": "x" * reading.LARGE_BYTES}).encode()
    large = [Slow() for _ in range(4)]
    reads = [asyncio.create_task(reader.read(each, kind)) for each in large[:3]]
    for each in large[:3]:
        each.pieces.put_nowait(body[:-1])
    with pytest.raises(ResourceExhaustedError, match="2 bodies of more than") as caught:
        await reads[2]
    assert caught.value.retry_after_s == 0.1
    small = Slow()
    for piece in (b'{"messages": [{"role": ', b'"user", "content": "hi"}]}', b""):
        small.pieces.put_nowait(piece)
    assert (await reader.read(small, kind)).messages
    for each in large[:2]:
        each.pieces.put_nowait(body[-1:])
        each.pieces.put_nowait(b"")
    assert all([(await read).messages for read in reads[:2]])
    left = asyncio.create_task(reader.read(large[3], kind))
    large[3].pieces.put_nowait(body)
    large[3].pieces.put_nowait(b"")
    assert (await left).user is not None
