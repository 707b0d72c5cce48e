"""Several replicas of the target: failover, return, and damage on the way."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from flyspec.client import GenerateOptions
from flyspec.errors import DeadlineExceededError, FlyspecError, UnavailableError
from flyspec.rules import Rule
from flyspec.values.admin import BreakerState
from flyspec.values.generation import RecoveryKind
from flyspec.values.tokens import SamplingParams
from orchestrator.upstreams.connection import read
from orchestrator.upstreams.verify import GrpcVerifySession
from tests.orchestrator.stacks import (
    generate,
    held,
    orchestrator_over,
    slow,
    start_stack,
    until_ready,
)
from tests.waiting import until

PROMPT = "The cat sat on the mat, and the dog sat"


def asked(max_tokens, k=None, **options):
    return GenerateOptions(
        rule=Rule("exact"),
        max_tokens=max_tokens,
        num_speculative_tokens=k,
        ignore_eos=True,
        **options,
    )


@asynccontextmanager
async def two_targets(model_dirs):
    """Two targets, slow enough to be lost in the middle of a text, and an orchestrator."""
    async with (
        start_stack(model_dirs) as one,
        start_stack(model_dirs) as two,
        orchestrator_over(one, two) as (client, admin),
    ):
        for stack in (one, two):
            slow(stack)
        yield one, two, client, admin


async def target_is(admin, breaker) -> bool:
    """True if the only target's breaker is so."""
    (target,) = (await admin.status()).targets
    return target.breaker is breaker


@pytest.mark.parametrize("k", [0, 4])
async def test_a_lost_target_gives_way_to_the_other(model_dirs, greedy, k):
    async with two_targets(model_dirs) as (one, two, client, admin):

        async def kill():
            (serving,) = (s for s in (one, two) if s.verify_engine.sessions.active)
            await serving.verify_server.stop(0)

        tokens, ids, completion = await generate(client, PROMPT, asked(60, k), kill)
        assert tokens == greedy(ids, 60)
        (recovery,) = completion.recoveries
        assert recovery.kind is RecoveryKind.TARGET_REOPENED
        await until_ready(admin, 1)
        targets = {t.address: t for t in (await admin.status()).targets}
        assert targets[recovery.successor].ready


@pytest.mark.parametrize("times", [1, 2, None])
async def test_what_is_damaged_on_its_way_is_not_the_clients_fault(
    stack, monkeypatch, greedy, times
):
    """A round that the target refuses as invalid is sent again, and in the end it is INTERNAL."""
    send, damaged = GrpcVerifySession.send, []

    async def damage(self, sequence, round_, distributions):
        if len(sequence) > 20 and (times is None or len(damaged) < times):
            damaged.append(round_)
            round_ = replace(round_, draft_token_ids=[2**31])
        await send(self, sequence, round_, distributions)

    monkeypatch.setattr(GrpcVerifySession, "send", damage)
    if times is None:
        with pytest.raises(FlyspecError, match="no fault of the request") as failed:
            await stack.client.complete(PROMPT, asked(30, 4))
        assert failed.value.status == "INTERNAL"
        assert 1 < len(damaged) < 10
        return
    done = await stack.client.complete(PROMPT, asked(30, 4))
    assert done.token_ids == greedy(done.started.prompt_token_ids, 30)
    assert len(damaged) == times
    assert [r.kind for r in done.completion.recoveries] == [RecoveryKind.TARGET_REOPENED]


async def test_a_verdict_damaged_on_its_way_is_asked_for_again(stack, monkeypatch, greedy):
    damaged = []

    async def damage(call):
        message = await read(call)
        if not damaged and message.decisions:
            damaged.append(message)
            message.decisions[0].outcome = 99
        return message

    monkeypatch.setattr("orchestrator.upstreams.verify.read", damage)
    done = await stack.client.complete(PROMPT, asked(20, 4))
    assert done.token_ids == greedy(done.started.prompt_token_ids, 20)
    assert damaged


@pytest.mark.parametrize("k", [0, 4])
async def test_a_target_whose_model_fails_gives_way_to_the_other(model_dirs, greedy, k):
    async with two_targets(model_dirs) as (one, two, client, _):

        def fail(*_):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        model = one.verify_engine.model
        model.forward = model.draw = fail
        texts = [f"{n} {PROMPT}" for n in range(8)]
        done = await asyncio.gather(*(client.complete(text, asked(12, k)) for text in texts))
        for completion in done:
            assert completion.token_ids == greedy(completion.started.prompt_token_ids, 12)
        recoveries = [r for completion in done for r in completion.completion.recoveries]
        assert any("illegal memory access" in r.reason for r in recoveries)
        assert "its device failed" in one.verify_engine.failures.lost.result(timeout=0)
        assert not two.verify_engine.failures.lost.done()


async def test_a_target_that_hangs_is_tried_by_one_before_the_others(model_dirs, greedy):
    async with start_stack(model_dirs, round_timeout_s=0.5, probe_interval_s=0.1) as stack:
        texts = [f"{n} {PROMPT}" for n in range(4)]
        with held(stack):
            work = asyncio.gather(*(stack.client.complete(text, asked(12)) for text in texts))
            await until(lambda: target_is(stack.admin, BreakerState.HALF_OPEN))
        for completion in await work:
            assert completion.token_ids == greedy(completion.started.prompt_token_ids, 12)
            assert completion.completion.recoveries
        assert await target_is(stack.admin, BreakerState.CLOSED)


async def test_with_no_target_left_streams_wait_for_one_to_come_back(model_dirs):
    async with two_targets(model_dirs) as (one, two, client, admin):
        options = asked(40, sampling=SamplingParams(0.9), seed=5)
        expected = (await client.complete(PROMPT, options)).token_ids
        returns = []

        async def kill_both():
            await one.verify_server.stop(0)
            await two.verify_server.stop(0)
            returns.append(asyncio.create_task(come_back()))

        async def come_back():
            await until_ready(admin, 0)
            await two.restart_verify()

        tokens, _, completion = await generate(client, PROMPT, options, kill_both)
        assert tokens == expected
        assert completion.recoveries[0].delay_ns > 0
        await asyncio.gather(*returns)


async def test_a_request_waits_for_a_target_until_its_own_deadline(model_dirs, greedy):
    async with (
        start_stack(model_dirs) as one,
        orchestrator_over(one, reopen_timeout_s=0.0) as (client, admin),
    ):
        slow(one)
        options = asked(40, timeout_s=60.0)
        restarts = []

        async def come_back():
            await until_ready(admin, 0)
            await one.restart_verify()

        async def kill():
            await one.verify_server.stop(0)
            restarts.append(asyncio.create_task(come_back()))

        tokens, ids, completion = await generate(client, PROMPT, options, kill)
        assert tokens == greedy(ids, 40)
        assert completion.recoveries[0].kind is RecoveryKind.TARGET_REOPENED
        await asyncio.gather(*restarts)
        await one.verify_server.stop(0)
        with pytest.raises(DeadlineExceededError):
            await client.complete(PROMPT, replace(options, timeout_s=0.5))
        with pytest.raises(UnavailableError, match="verify service"):
            await client.complete(PROMPT, asked(4))
        await one.restart_verify()
        await until_ready(admin, 1)
        assert (await client.complete(PROMPT, asked(4))).token_ids
