"""Clients that leave, do not read, or send too slowly: nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os

import openai
import pytest

from orchestrator.front.http import connection, gate
from tests.examples import examples
from tests.http.clients import CHAT, LONG, SAID, client_of, connect, request, scrape
from tests.orchestrator.stacks import held, slow, start_stack
from tests.waiting import until


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_generations(chat_dirs, stream):
    async with start_stack(chat_dirs, http_port=0) as stack:
        with held(stack):
            _, writer = await connect(stack)
            writer.write(request({**LONG, "stream": stream, "n": 3}))
            await stack.until(active_generations=3)
            writer.close()
            await stack.until(active_generations=0, waiting_generations=0)
        assert await stack.idle()
        await until(lambda: scrape(stack).total("flyspec_http_open_requests") == 0)
        ended = scrape(stack).find("flyspec_http_requests_total", path=CHAT)
        assert [labels["code"] for labels, _ in ended] == ["499"]
        assert scrape(stack).total("flyspec_requests_total", status="CANCELLED") == 3


async def test_many_that_leave_at_any_time_leave_nothing(served):
    slow_down, before = asyncio.Semaphore(32), len(asyncio.all_tasks())
    files = len(os.listdir("/proc/self/fd"))

    async def leave(number: int) -> None:
        async with slow_down:
            _, writer = await connect(served)
            writer.write(request({**LONG, "stream": number % 2 == 0}))
            await asyncio.sleep(number % 31 * 0.002)
            if number % 3 == 0:
                writer.transport.abort()
            writer.close()

    await asyncio.gather(*(leave(number) for number in range(examples(200))))
    assert await served.idle()
    await until(lambda: scrape(served).total("flyspec_http_open_requests") == 0)
    await until(lambda: len(asyncio.all_tasks()) <= before + 2)
    await until(lambda: len(os.listdir("/proc/self/fd")) <= files + 2)


async def test_a_client_that_reads_nothing_loses_its_slot_and_holds_up_nobody(chat_dirs):
    async with start_stack(chat_dirs, http_port=0, write_timeout_s=1.5, max_concurrent=8) as stack:
        _, writer = await connect(stack, size=4096)
        most = {"logprobs": True, "top_logprobs": 20, "n": 8, "stream": True}
        writer.write(request({**LONG, **most}))
        await stack.until(active_generations=8)
        async with client_of(stack) as client:
            reply = await client.post(CHAT, json={"messages": SAID, "max_tokens": 4})
            assert reply.status_code == 200
        assert await stack.idle()
        await until(lambda: scrape(stack).total("flyspec_http_open_requests") == 0)
        await until(lambda: not stack.orchestrator._http._server.server_state.connections)
        writer.close()


async def test_slow_and_endless_heads_are_cut_off(served, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    reader, writer = await connect(served)  # silent
    assert await asyncio.wait_for(reader.read(), 5) == b""
    reader, writer = await connect(served)
    writer.write(b"POST / HTTP/1.1\r\nx: ")
    assert await asyncio.wait_for(reader.read(), 5) == b""
    reader, writer = await connect(served)
    for _ in range(40):
        writer.write(b"a: " + b"x" * 4096 + b"\r\n" if _ else b"POST / HTTP/1.1\r\n")
        await asyncio.sleep(0)
    with contextlib.suppress(ConnectionResetError):  # what it does not read, it resets
        assert b"400 Bad Request" in await asyncio.wait_for(reader.read(), 5)
    assert reader.at_eof() or reader.exception()


async def test_a_body_that_does_not_come(served, monkeypatch):
    monkeypatch.setattr(gate, "REQUEST_TIMEOUT_S", 0.2)
    monkeypatch.setattr(gate, "DISCARD_S", 0.1)
    reader, writer = await connect(served)
    writer.write(request(LONG)[:-10])
    answer = await asyncio.wait_for(reader.read(), 5)
    assert b"408 Request Timeout" in answer
    assert b"body did not come within" in answer
    writer.close()


async def test_a_connection_is_kept_for_more_requests(served):
    reader, writer = await connect(served)
    for _ in range(3):
        writer.write(request({"messages": SAID, "max_tokens": 1}))
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        assert json.loads(await reader.readexactly(length))["choices"]
    writer.close()


async def test_draining_refuses_new_requests_and_finishes_running_ones(chat_dirs):
    async with start_stack(chat_dirs, http_port=0) as stack, client_of(stack) as client:
        with held(stack):
            running = asyncio.create_task(client.post(CHAT, json={**LONG, "max_tokens": 5}))
            await stack.until(active_generations=1)
            await stack.admin.drain()
            reply = await client.post(CHAT, json=LONG)
            assert (reply.status_code, reply.json()["error"]["type"]) == (503, "server_error")
            assert "draining" in reply.json()["error"]["message"]
            assert (await client.get("/health")).status_code == 503
        assert (await running).status_code == 200
        await stack.admin.drain(resume=True)
        assert (await client.get("/health")).status_code == 200


async def test_a_full_server_says_when_to_try_again(chat_dirs):
    async with (
        start_stack(
            chat_dirs, http_port=0, max_concurrent=1, max_waiting=0, max_queue_wait_s=0.0
        ) as stack,
        client_of(stack) as client,
    ):
        with held(stack):
            running = asyncio.create_task(client.post(CHAT, json={**LONG, "max_tokens": 5}))
            await stack.until(active_generations=1)
            for more in ({}, {"stream": True}, {"n": 2}):
                reply = await client.post(CHAT, json={**LONG, **more})
                assert reply.status_code == 429
                assert int(reply.headers["retry-after"]) >= 1
                assert reply.json()["error"]["type"] == "rate_limit_error"
        assert (await running).status_code == 200


async def test_choices_wait_for_each_other(chat_dirs):
    """More choices than there is room for, on an otherwise idle server, of a limited client."""
    limits = {"max_waiting": 1, "max_requests_per_minute_per_client": 2}
    for more in ({"max_concurrent": 2}, {"max_concurrent_per_client": 3}):
        async with start_stack(chat_dirs, http_port=0, **limits, **more) as stack:
            async with client_of(stack) as client:
                asked = {"messages": SAID, "max_tokens": 5, "n": 12}
                reply = await client.post(CHAT, json=asked)
                assert reply.status_code == 200, reply.text
                assert len(reply.json()["choices"]) == 12
                stream = await client.post(CHAT, json=asked | {"stream": True})
                assert stream.text.endswith("data: [DONE]\n\n")
                refused = await client.post(CHAT, json=asked)
                assert refused.status_code == 429
                assert "2 requests per minute" in refused.json()["error"]["message"]
            assert await stack.idle()


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
async def test_a_server_that_stops_says_so(chat_dirs, path):
    asked = LONG if path == CHAT else {"input": "the cat", "ignore_eos": True}
    async with start_stack(chat_dirs, http_port=0) as stack:
        with held(stack):
            reader, writer = await connect(stack)
            writer.write(request(asked, path))
            streaming, to_stream = await connect(stack)
            to_stream.write(request({**asked, "stream": True}, path))
            await stack.until(active_generations=2)
            await streaming.readuntil(b"data: ")
            await stack.orchestrator._http.stop(0.1)
            whole, rest = await reader.read(), await streaming.read()
        assert b"503 Service Unavailable" in whole
        assert b"x-request-id" in whole
        for said in (whole, rest):
            assert b"the server stopped before the end; send the request again" in said
        assert (b"[DONE]" in rest) == (path == CHAT)
        assert rest.endswith(b"0\r\n\r\n")
        writer.close()
        to_stream.close()


async def test_large_heads_are_refused_before_they_are_parsed(served):
    for size, code in ((60_000, b"200"), (66_000, b"400"), (120_000, b"400")):
        reader, writer = await connect(served)
        body = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}'
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nx: "
        length = f"\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + b"x" * size + length.encode() + body)
        assert (await reader.readline()).split()[1] == code
        writer.close()


ASKED = {
    "model": "target:exact",
    "messages": [{"role": "user", "content": "The cat sat on the"}],
    "max_tokens": 120,
    "extra_body": {"speculation": {"numSpeculativeTokens": 4}, "ignore_eos": True},
}


async def test_a_stream_outlives_its_drafter(chat_dirs):
    async with (
        start_stack(chat_dirs, http_port=0) as stack,
        openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{stack.http_port}/v1", api_key="none", max_retries=0
        ) as api,
    ):
        whole = await api.chat.completions.create(**ASKED)
        assert whole.recoveries == []
        slow(stack)
        text, killed, last = "", False, None
        async for chunk in await api.chat.completions.create(**ASKED, stream=True):
            last = chunk
            text += chunk.choices[0].delta.content or ""
            if text and not killed:
                killed = True
                await stack.draft_server.stop(0)
        assert text == whole.choices[0].message.content
        kinds = [recovery["kind"] for recovery in last.recoveries]
        assert kinds[0].startswith("DRAFTER_")
        assert last.recoveries[0]["reason"]
