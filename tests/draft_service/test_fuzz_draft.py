"""Hostile messages to the draft service: the right status, and no other effect."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from draft_service import service as service_module
from flyspec import wire
from flyspec.rpc import malformed
from flyspec.v1 import draft_pb2
from tests.draft_service.draft_harness import Service, StartService
from tests.hostile import fuzz
from tests.waiting import until


async def test_thousands_of_hostile_messages_change_nothing(
    service_with: StartService, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (malformed, service_module):
        monkeypatch.setattr(module, "REQUEST_TIMEOUT_S", 2.0)
    async with service_with(max_sessions=40, idle_timeout_s=6.0) as service:
        report = await fuzz("draft", {"draft": f"127.0.0.1:{service.port}"}, 1000)
        assert report.statuses["OK"] > 20
        assert report.statuses["INVALID_ARGUMENT"] > 40
        await until(lambda: service.active == 0)


@pytest.mark.parametrize("ids", [(5, 5), (2**64 - 1, 0)])
async def test_rounds_come_once_and_in_order(service: Service, ids: tuple[int, int]) -> None:
    client = await service.client().open([1, 2, 3])
    await client.advance(3, round_id=ids[0])
    await client.send(3, round_id=ids[1])
    code, details = await client.status()
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "once and in order" in details
    await until(lambda: service.active == 0)


@pytest.mark.parametrize(
    "message",
    [
        draft_pb2.DraftRequest(advance={"append_token_ids": [5] * 2_000_000, "keep_length": 1}),
        draft_pb2.DraftRequest(open={"token_ids": [5] * 2_000_000}),
        draft_pb2.DraftRequest(
            open={"token_ids": [5], "sampling": {"logit_bias": dict.fromkeys(range(5000), 1.0)}}
        ),
    ],
    ids=["append", "open", "bias"],
)
async def test_absurd_lists_are_refused_unread(
    service: Service, message: draft_pb2.DraftRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(message: draft_pb2.DraftRequest) -> None:
        if message.ByteSize() > 10_000:
            raise AssertionError("read")

    original = wire.unwrap
    monkeypatch.setattr(wire, "unwrap", lambda m: read(m) or original(m))
    client = service.client()
    if message.HasField("advance"):
        await client.open([1, 2, 3])
    await client.call.write(message)
    code, _ = await client.status()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    await until(lambda: service.active == 0)


async def test_long_sequences_without_a_model_hold_up_nobody(service: Service) -> None:
    """They are indexed in a thread; meanwhile others are answered repeatedly."""
    period = list(range(1000, 1013))
    text = (period * 8000)[:100_000]
    long = await service.client().open(text, drafter="prompt_lookup")
    short = await service.client().open([1, 2, 3], drafter="prompt_lookup")
    await long.send(len(text), max_tokens=8)
    answers = 0
    reading = asyncio.ensure_future(long.read())
    while not reading.done():
        await short.advance(3)
        answers += 1
    assert answers > 3
    start = len(text) % len(period)
    assert reading.result().token_ids == (period * 2)[start : start + 8]
    # Back to the beginning, and as far forward again.
    chunks = await long.advance(5, text[5:], 8)
    assert chunks[0].token_ids == (period * 2)[start : start + 8]
    await long.send(100_500)
    assert (await long.status())[0] is grpc.StatusCode.FAILED_PRECONDITION
    await short.call.done_writing()
    await until(lambda: service.active == 0)


async def test_a_request_beyond_all_sizes_is_refused_by_grpc(service: Service) -> None:
    client = service.client()
    await client.call.write(draft_pb2.DraftRequest(open={"token_ids": [1 << 31] * 3_000_000}))
    assert (await client.status())[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
