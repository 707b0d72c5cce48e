"""Several replicas of the target: balancing, failover, return, and one with another model."""

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
from tests.tiny import make_model
from tests.waiting import until

EXACT = Rule("exact")
PROMPT = "The cat sat on the mat, and the dog sat"


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


@pytest.mark.parametrize("k", [0, 4])
async def test_a_lost_target_gives_way_to_the_other(model_dirs, greedy, k):
    async with two_targets(model_dirs) as (one, two, client, admin):
        options = GenerateOptions(
            rule=EXACT, max_tokens=100, ignore_eos=True, num_speculative_tokens=k
        )

        async def kill():
            for stack in (one, two):
                if stack.verify_engine.sessions.active:
                    await stack.verify_server.stop(0)
                    return
            raise AssertionError("nobody serves")

        tokens, ids, completion = await generate(client, PROMPT, options, kill)
        assert tokens == greedy(ids, 100)
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
        if len(sequence) > 30 and (times is None or len(damaged) < times):
            damaged.append(round_)
            round_ = replace(round_, draft_token_ids=[2**31])
        await send(self, sequence, round_, distributions)

    monkeypatch.setattr(GrpcVerifySession, "send", damage)
    options = GenerateOptions(rule=EXACT, num_speculative_tokens=4, max_tokens=40)
    if times is None:
        with pytest.raises(FlyspecError, match="no fault of the request") as failed:
            await stack.client.complete(PROMPT, options)
        assert failed.value.status == "INTERNAL"
        assert 1 < len(damaged) < 10
        return
    done = await stack.client.complete(PROMPT, options)
    assert done.token_ids == greedy(list(done.started.prompt_token_ids), 40)
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
    options = GenerateOptions(rule=EXACT, num_speculative_tokens=4, max_tokens=40)
    done = await stack.client.complete(PROMPT, options)
    assert done.token_ids == greedy(list(done.started.prompt_token_ids), 40)
    assert damaged


@pytest.mark.parametrize("k", [0, 4])
async def test_a_target_whose_model_fails_gives_way_to_the_other(model_dirs, greedy, k):
    async with two_targets(model_dirs) as (one, two, client, _):

        def fail(*_):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        model = one.verify_engine.model
        model.forward = model.draw = fail
        options = GenerateOptions(
            rule=EXACT, max_tokens=20, ignore_eos=True, num_speculative_tokens=k
        )
        done = await asyncio.gather(*(client.complete(f"{n} {PROMPT}", options) for n in range(8)))
        for completion in done:
            assert completion.token_ids == greedy(completion.started.prompt_token_ids, 20)
        recoveries = [r for completion in done for r in completion.completion.recoveries]
        assert any("illegal memory access" in r.reason for r in recoveries)
        assert "its device failed" in one.verify_engine.failures.lost.result(timeout=0)
        assert not two.verify_engine.failures.lost.done()


async def test_a_target_that_hangs_is_tried_by_one_before_the_others(model_dirs, greedy):
    async with start_stack(model_dirs, round_timeout_s=0.5, probe_interval_s=0.1) as stack:
        options = GenerateOptions(rule=EXACT, max_tokens=20, ignore_eos=True)

        async def is_on_trial() -> bool:
            (target,) = (await stack.admin.status()).targets
            return target.breaker is BreakerState.HALF_OPEN

        with held(stack):
            work = asyncio.gather(*(stack.client.complete(f"{n} {PROMPT}", options)
                                    for n in range(4)))  # fmt: skip
            await until(is_on_trial)
        for completion in await work:
            assert completion.token_ids == greedy(completion.started.prompt_token_ids, 20)
            assert completion.completion.recoveries
        (target,) = (await stack.admin.status()).targets
        assert target.breaker is BreakerState.CLOSED


async def test_with_no_target_left_streams_wait_for_one_to_come_back(model_dirs, greedy):
    async with two_targets(model_dirs) as (one, two, client, admin):
        options = GenerateOptions(
            rule=EXACT, max_tokens=80, ignore_eos=True, sampling=SamplingParams(0.9), seed=5
        )
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


async def test_a_request_while_no_target_answers_says_so(model_dirs):
    async with (
        start_stack(model_dirs) as one,
        orchestrator_over(one, reopen_timeout_s=0.3) as (client, admin),
    ):
        await one.verify_server.stop(0)
        with pytest.raises(UnavailableError, match="verify service"):
            await client.complete(PROMPT, GenerateOptions(max_tokens=4))
        await one.restart_verify()
        await until_ready(admin, 1)
        assert (await client.complete(PROMPT, GenerateOptions(max_tokens=4))).token_ids


async def test_a_request_waits_for_a_target_until_its_own_deadline(model_dirs, greedy):
    async with (
        start_stack(model_dirs) as one,
        orchestrator_over(one, reopen_timeout_s=0.0) as (client, admin),
    ):
        slow(one)
        options = GenerateOptions(rule=EXACT, max_tokens=60, ignore_eos=True, timeout_s=60.0)
        restarts = []

        async def come_back():
            await until_ready(admin, 0)
            await one.restart_verify()

        async def kill():
            await one.verify_server.stop(0)
            restarts.append(asyncio.create_task(come_back()))

        tokens, ids, completion = await generate(client, PROMPT, options, kill)
        assert tokens == greedy(ids, 60)
        assert completion.recoveries[0].kind is RecoveryKind.TARGET_REOPENED
        await asyncio.gather(*restarts)
        await one.verify_server.stop(0)
        with pytest.raises(DeadlineExceededError):
            await client.complete(PROMPT, replace(options, timeout_s=0.5))


async def test_sessions_are_spread_over_replicas(model_dirs):
    async with two_targets(model_dirs) as (one, two, client, _):
        options = GenerateOptions(rule=EXACT, max_tokens=40, ignore_eos=True)
        texts = [f"{n} {PROMPT}" for n in range(16)]

        def shares() -> list[int]:
            return [stack.verify_engine.sessions.opened_total for stack in (one, two)]

        with held(one, two):
            work = asyncio.gather(*(client.complete(text, options) for text in texts))
            await until(lambda: sum(shares()) >= 16)
        await work
        assert sum(shares()) == 16
        assert min(shares()) >= 4


async def test_another_model_behind_an_address_is_not_used(model_dirs, tmp_path):
    other = str(make_model(tmp_path / "other", seed=3, hidden_size=56))
    async with (
        start_stack(model_dirs) as one,
        start_stack((other, model_dirs[1])) as two,
        orchestrator_over(one, two) as (client, admin),
    ):
        targets = (await admin.status()).targets
        assert [t.ready for t in targets] == [True, False]
        assert "its weights fingerprint is" in targets[1].error
        for n in range(4):
            await client.complete(f"{n} {PROMPT}", GenerateOptions(max_tokens=4))
        assert two.verify_engine.sessions.opened_total == 0


async def test_two_orchestrators_share_the_services(model_dirs, greedy):
    async with start_stack(model_dirs) as one, orchestrator_over(one) as (client, _):
        options = GenerateOptions(rule=EXACT, max_tokens=40, ignore_eos=True)
        both = [one.client, client] * 4
        texts = await asyncio.gather(*(c.complete(PROMPT, options) for c in both))
        assert {tuple(t.token_ids) for t in texts} == {
            tuple(greedy(texts[0].started.prompt_token_ids, 40))
        }
