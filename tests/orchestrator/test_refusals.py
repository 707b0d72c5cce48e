"""What clients of a full, limited or draining orchestrator see, through real services."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from contextlib import aclosing
from dataclasses import replace

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from flyspec import wire
from flyspec.client import GenerateOptions
from flyspec.errors import InvalidArgumentError, ResourceExhaustedError
from flyspec.rules import Rule
from flyspec.v1 import generation_pb2, generation_pb2_grpc
from orchestrator.front.grpc import GenerationServicer
from tests.orchestrator.scripted import Taker, scripted
from tests.orchestrator.stacks import held, start_stack
from tests.waiting import until

PROMPT = "The cat sat on the mat"
EXACT = Rule("exact")
LONG = GenerateOptions(rule=EXACT, ignore_eos=True, max_tokens=150)
SHORT = GenerateOptions(rule=EXACT, max_tokens=4)


async def running(stack, options=LONG):
    """A generation that has started."""
    task = asyncio.create_task(stack.client.complete(PROMPT, options))
    await stack.until(active_generations=1)
    return task


async def test_a_refusal_carries_retry_info(model_dirs):
    async with start_stack(model_dirs, max_concurrent=1, max_waiting=0) as stack:
        port, _ = stack.orchestrator.ports
        with held(stack):
            task = await running(stack)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = generation_pb2_grpc.GenerationServiceStub(channel)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Generate(generation_pb2.GenerateRequest(text=PROMPT)).read()
            with pytest.raises(ResourceExhaustedError, match="1 running, 0 waiting") as told:
                await stack.client.complete(PROMPT, SHORT)
        status = rpc_status.from_call(caught.value)
        (detail,) = status.details
        info = error_details_pb2.RetryInfo()
        assert detail.Unpack(info)
        assert info.retry_delay.ToTimedelta().total_seconds() > 0
        assert "; retry in " in str(told.value)
        assert told.value.retry_after_s > 0
        assert (await stack.admin.status()).refused_total == 2
        # Who is patient gets it.
        assert (await stack.client.complete(PROMPT, SHORT, patience_s=60.0)).token_ids
        await task
        assert await stack.idle()


@pytest.mark.parametrize("method", ["Generate", "Score"])
async def test_a_client_over_its_limit_is_refused_before_its_request(model_dirs, method):
    async with start_stack(model_dirs, max_concurrent_per_client=1) as stack:
        port, _ = stack.orchestrator.ports
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            path = f"/flyspec.v1.GenerationService/{method}"
            silent = channel.stream_stream(path)()
            await silent.initial_metadata()  # it is being read
            late = channel.stream_stream(path)()
            assert await asyncio.wait_for(late.code(), 20) is grpc.StatusCode.RESOURCE_EXHAUSTED
            silent.cancel()

            async def free() -> bool:
                with contextlib.suppress(ResourceExhaustedError):
                    return bool((await stack.client.complete(PROMPT, SHORT)).token_ids)
                return False

            await until(free)
        assert await stack.idle()


async def test_outstanding_tokens_are_told_and_bounded(model_dirs):
    async with start_stack(model_dirs, max_outstanding_tokens=300, max_waiting=5) as stack:
        events = stack.client.generate(PROMPT, replace(LONG, max_tokens=None))  # the context's 256
        async with aclosing(events):
            with held(stack):
                await anext(events)
                waiting = asyncio.create_task(
                    stack.client.complete(PROMPT, GenerateOptions(max_tokens=100, rule=EXACT))
                )
                await stack.until(active_generations=1, waiting_generations=1)
                assert 0 < (await stack.admin.status()).outstanding_tokens <= 256
            async for _ in events:
                if waiting.done() or (await stack.admin.status()).active_generations == 2:
                    break  # it was let in before the first had ended
            else:
                raise AssertionError("the second waited for the whole of the first")
        assert (await waiting).token_ids
        await stack.until(outstanding_tokens=0, active_generations=0)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"text": "the cat " * 350_000}, "characters, the first"),
        ({"text": "a" * 3_000_000}, "characters, the first"),
        (
            {"token_ids": {"ids": [3] * 3_000_000}},
            "token_ids.ids: at most 256 allowed, got 3000000",
        ),
        ({"chat": {"messages": [{}] * 1_000_000}}, "more than 65536 fields"),
        (
            {"text": "a", "speculation": {"phases": [{}] * 30_000}},
            "speculation.phases: at most 16 allowed, got 30000",
        ),
        (
            {"text": "a", "speculation": {"num_draft_tokens_per_round": [1] * 1_000_000}},
            "speculation.num_draft_tokens_per_round: at most 256 allowed, got 1000000",
        ),
        (
            {"chat": {"messages": [{"role": "x"}], "tools_json": "[" + "{}," * 70_000 + "{}]"}},
            "chat.tools_json: at most 65536 names, texts, lists and objects allowed",
        ),
        (
            {"chat": {"messages": [{"role": "user", "content": "the cat " * 35_000}] * 10}},
            "characters, the first",
        ),
    ],
    ids=["words", "letters", "ids", "messages", "phases", "rounds", "tools", "chat"],
)
async def test_prompts_of_absurd_size_cost_little(stack, request_, message):
    port, _ = stack.orchestrator.ports
    request = generation_pb2.GenerateRequest(**request_)
    limit = [("grpc.max_send_message_length", 64 << 20)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=limit) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        begin = time.process_time()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(request).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message in caught.value.details()
    # Of this process, which is client and server: to tokenize it all takes a minute.
    assert time.process_time() - begin < 5.0
    assert (await stack.client.complete(PROMPT, SHORT)).token_ids


@pytest.mark.parametrize("count", [1, 20_000])
async def test_a_long_request_is_read_where_nothing_waits_for_it(monkeypatch, count):
    threads = []

    def decode(cls, message):
        threads.append(threading.current_thread())
        return read(cls, message)

    read = wire.decode
    monkeypatch.setattr(wire, "decode", decode)
    request = generation_pb2.GenerateRequest(chat={"messages": [{"role": "user"}] * count})
    async with scripted() as inside:
        context = Taker()
        with pytest.raises(grpc.aio.AbortError):
            await GenerationServicer(inside.generations, 5.0).Generate(request, context)
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (threads == [threading.current_thread()]) == (count == 1)


async def test_a_request_beyond_the_largest_is_not_read(stack):
    methods = "GenerationService/Generate", "AdminService/GetStatus"
    for port, method in zip(stack.orchestrator.ports, methods, strict=True):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_stream(f"/flyspec.v1.{method}")(b"\0" * (4 << 20))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await stack.client.complete(PROMPT, SHORT)).token_ids


async def test_a_prompt_that_is_only_too_long_is_counted_exactly(stack):
    with pytest.raises(InvalidArgumentError, match=r"length is \d+ tokens, but it has"):
        await stack.client.complete("the cat " * 300, SHORT)
