"""Generations in plain values over scripted services: no gRPC, no port, no model."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import replace

import grpc
import pytest

from flyspec.errors import (
    DeadlineExceededError,
    IncompatibleError,
    InvalidArgumentError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnavailableError,
)
from flyspec.security import ApiKey, Scope
from flyspec.values.chat import Chat
from flyspec.values.generation import Chunk, FinishReason, RecoveryKind
from flyspec.values.tokens import Origin
from orchestrator.admission.clients import Caller
from tests.orchestrator.scripted import EOS, Target, expected, request, run, script, scripted
from tests.orchestrator.tokenizer import BUNDLE, TOKENIZER
from tests.waiting import until


@pytest.fixture(autouse=True)
def no_ports(monkeypatch):
    """No port is opened and no connection is made."""

    def refuse(*args, **options):
        raise AssertionError("gRPC in a generation without it")

    for name in ("server", "insecure_channel", "secure_channel"):
        monkeypatch.setattr(grpc.aio, name, refuse)


@pytest.mark.parametrize("k", [0, 1, 4, 15])
async def test_a_generation_is_the_script(k):
    async with scripted() as inside:
        asked = request(num_speculative_tokens=k, max_tokens=60, return_rounds=True)
        found = await run(inside, asked, request_id="r-1")
        started, completion = found.started, found.completion
        assert (found.events[0], found.events[-1]) == (started, completion)
        assert (started.request_id, started.model) == ("r-1", "scripted")
        assert started.drafter == ("guess" if k else "")
        assert found.tokens == expected(60)
        assert found.text == TOKENIZER.decode(found.tokens)
        assert found.chunks[-1].num_final_tokens == 60
        assert set(found.origins) == {Origin.PLAIN} if not k else Origin.PLAIN not in found.origins
        assert completion.finish_reason is FinishReason.LENGTH
        assert (completion.prompt_tokens, completion.completion_tokens) == (3, 60)
        counts = completion.speculation
        assert counts.num_rounds == len(found.rounds)
        assert counts.num_draft_tokens == sum(len(r.decisions) for r in found.rounds)
        assert counts.num_rollbacks == counts.num_loose_tokens == completion.num_recoveries == 0
        assert found.drafters == (["guess"] if k else [])
        assert 0 < completion.timings.time_to_first_token_ns <= completion.timings.total_ns
        assert not any(inside.left)


async def test_text_and_chats_are_prompts_too():
    async with scripted() as inside:
        found = await run(inside, request("The cat sat", max_tokens=9))
        assert found.started.prompt_token_ids == TOKENIZER.encode("The cat sat")
        assert found.tokens == expected(9, found.started.prompt_token_ids)
        with pytest.raises(InvalidArgumentError, match="chat: "):  # it has no template
            await run(inside, request(Chat.of_user("The cat sat")))


async def test_the_end_and_stop_strings_end_it():
    def ends(tokens):
        return EOS if len(tokens) >= 20 else script(tokens)

    async with scripted(next_token=ends) as inside:
        whole = await run(inside, request())
        assert whole.tokens == expected(18, next_token=ends)
        ended = whole.completion
        assert (ended.finish_reason, ended.stop_reason) == (FinishReason.STOP, None)
        stop = whole.text[5:7]
        for k in (0, 15):
            cut = await run(inside, request(stop=[stop], num_speculative_tokens=k))
            assert cut.completion.stop_reason == stop
            assert cut.text == whole.text[: whole.text.index(stop)]
        assert not any(inside.left)


@pytest.mark.parametrize("rests", [False, True])
async def test_a_repeated_run_waits_for_its_drafter(rests):
    """Which times out without it, in this generation and, if it `rests`, in one before."""
    async with scripted() as inside:
        asked = request(max_tokens=30)
        first = await run(inside, asked)
        ks = first.completion.num_draft_tokens_per_round
        assert max(ks) == 4
        drafter = inside.drafters["drafter:1"]
        drafter.timeout_s, drafter.pause_s = 0.05, 0.1
        if rests:
            assert (await run(inside, asked)).completion.num_recoveries
        asked = request(max_tokens=30, num_draft_tokens_per_round=ks, num_speculative_tokens=4)
        again = await run(inside, asked)
        assert again.origins == first.origins
        repeated = again.completion
        assert repeated.num_draft_tokens_per_round == ks
        assert (repeated.num_recoveries, repeated.speculation.num_unrepeated_rounds) == (0, 0)
        drafter.lost = True
        lost = await run(inside, asked)
        assert lost.completion.speculation.num_unrepeated_rounds > 0


async def test_a_tokenizer_that_cannot_be_read_is_named(monkeypatch):
    async def tokenizer(self):
        return replace(BUNDLE, tokenizer_json=BUNDLE.tokenizer_json[:-9])

    monkeypatch.setattr(Target, "tokenizer", tokenizer)
    with pytest.raises(IncompatibleError, match="tokenizer of the verify service at target:1"):
        async with scripted():
            pass


async def test_one_that_is_closed_leaves_nothing_behind():
    async with scripted(pause_s=0.001) as inside:
        async with aclosing(inside.generations.run(request())) as events:
            async for event in events:
                if isinstance(event, Chunk):
                    assert inside.sessions == 2
                    break
        assert not any(inside.left)


async def test_one_that_is_cancelled_leaves_nothing_behind():
    async with scripted(pause_s=0.005, max_concurrent=1) as inside:
        running = asyncio.create_task(run(inside, request(max_tokens=200)))
        await until(lambda: inside.sessions == 2)
        waiting = asyncio.create_task(run(inside, request()))
        await until(lambda: inside.admission.waiting)
        for task in (waiting, running):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert inside.admission.waiting == 0
        assert not any(inside.left)


async def test_who_is_not_let_in_is_told_why():
    async with scripted(pause_s=0.01, max_concurrent=1, max_waiting=1) as inside:
        tasks = [asyncio.create_task(run(inside, request(max_tokens=8))) for _ in range(2)]
        await asyncio.sleep(0.005)
        with pytest.raises(ResourceExhaustedError, match="all slots are taken") as caught:
            await run(inside, request())
        assert caught.value.retry_after_s > 0
        assert all(each.tokens == expected(8) for each in await asyncio.gather(*tasks))
        key = ApiKey("k", frozenset([Scope.GENERATE]), max_tokens_per_request=10)
        with pytest.raises(PermissionDeniedError, match="prompt and output may reach 23 tokens"):
            await run(inside, request(max_tokens=20), key=key)
        with pytest.raises(InvalidArgumentError, match="max_tokens must be at least 1, got -1"):
            await run(inside, request(max_tokens=-1))
        inside.admission.drain()
        with pytest.raises(UnavailableError, match="the server is draining"):
            await run(inside, request())
        assert not any(inside.left)


async def test_a_deadline_ends_the_generation_and_not_what_its_reader_does():
    async with scripted(pause_s=0.005) as inside:
        loop = asyncio.get_running_loop()
        with pytest.raises(DeadlineExceededError, match="of up to 256 prompt and output"):
            await run(inside, request(ignore_eos=True), deadline=loop.time() + 0.05)
        naps = []

        async def nap_at_every_event():
            caller = Caller(deadline=loop.time() + 0.05)
            async with aclosing(inside.generations.run(request(), caller)) as events:
                async for _ in events:
                    began = time.monotonic()
                    await asyncio.sleep(0.1)
                    naps.append(time.monotonic() - began)

        with pytest.raises(DeadlineExceededError, match="allow more time"):
            await nap_at_every_event()
        assert len(naps) == 1
        assert naps[0] >= 0.09, "not cut short"
        assert not any(inside.left)


@pytest.mark.parametrize("targets", [1, 2])
async def test_a_target_lost_in_mid_stream_is_opened_again(targets):
    async with scripted(targets=targets, pause_s=0.001, probe_interval_s=0.02) as inside:
        hurt = []

        async def lose():
            hurt.extend(target for target in inside.targets.values() if target.sessions)
            hurt[0].lost = True
            asyncio.get_running_loop().call_later(0.1, setattr, hurt[0], "lost", False)

        found = await run(inside, request(max_tokens=100), {1: lose})
        assert found.tokens == expected(100)
        (recovery,) = found.completion.recoveries
        assert recovery.kind is RecoveryKind.TARGET_REOPENED
        assert "is lost" in recovery.reason
        assert [recovery.successor == target.address for target in hurt] == [targets == 1]
        assert not any(inside.left)


async def test_a_lost_drafter_costs_nothing_but_its_drafts():
    async with scripted(pause_s=0.001) as inside:

        async def lose():
            inside.drafters["drafter:1"].lost = True

        found = await run(inside, request(max_tokens=100), {10: lose})
        assert found.tokens == expected(100)
        assert found.completion.recoveries[0].kind is RecoveryKind.DRAFTER_FALLBACK
        assert not any(inside.left)


async def test_what_ended_a_generation_is_counted():
    async with scripted() as inside:

        def count(status):
            requests = inside.observer.metrics.requests
            return sum(
                s.value
                for s in requests.collect()[0].samples
                if s.name.endswith("_total") and s.labels["status"] == status
            )

        await run(inside, request(max_tokens=3))
        assert count("OK") == 1
        with pytest.raises(InvalidArgumentError):
            await run(inside, request([]))
        with pytest.raises(InvalidArgumentError):
            inside.generations.refuse(InvalidArgumentError("not JSON"))
        assert count("INVALID_ARGUMENT") == 2
        events = inside.generations.run(request())
        await anext(events)
        await events.aclose()
        assert count("CANCELLED") == 1
        events = inside.generations.run(request())
        await anext(events)
        with pytest.raises(DeadlineExceededError):
            await events.athrow(DeadlineExceededError("the client read nothing"))
        assert count("DEADLINE_EXCEEDED") == 1
        assert not any(inside.left)
