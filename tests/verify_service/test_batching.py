"""Continuous batching: a session gets the same answers in a batch as alone (float64)."""

from __future__ import annotations

import asyncio
import random
import statistics

import pytest

from flyspec.engine.scheduler import StepBudget
from tests.verify_service.crowd import Member, no_sessions, running

SMALL = StepBudget(max_tokens=160, prefill_chunk=24)


async def crowd(engine, members, concurrent, scouts):
    """Run all sessions, `concurrent` of them at once, joining at random times."""
    scouting, room = asyncio.Semaphore(scouts), asyncio.Semaphore(concurrent)
    rng = random.Random(len(members))

    async def live(member):
        async with room:
            await asyncio.sleep(rng.uniform(0, 0.2))
            await member.live(engine, scouting)

    await asyncio.gather(*(live(member) for member in members))


async def check_crowd(target_dir, members, slots, concurrent, every_scout, **options):
    """Run the crowd, then each session alone, every second one with a new session per round."""
    scouts = slots - concurrent
    async with running(target_dir, slots, SMALL, **options) as (engine, runner):
        await crowd(engine, members, concurrent, scouts)
        status = await no_sessions(engine, runner)
        batch = statistics.mean(runner.batches)
        pieces, copies = runner.pieces, runner.copies
        assert max(runner.batches) > 10
    records = [member.record for member in members]
    scouted = [record for member in members for record in member.scouts]
    async with running(target_dir, 1) as (engine, runner):
        runner.cache.reuse = False
        for i, record in enumerate([*records, *scouted[::every_scout]]):
            await record.check(engine, fresh=bool(i % 2))
        assert set(runner.batches) == {1}
        assert not runner.pieces
    rollbacks, loose = (sum(getattr(m, name) for m in members) for name in ("rollbacks", "loose"))
    returns = sum(m.returns for m in members)
    print(
        f"{status.opened_total} sessions in {slots} slots, {len(members)} members, "
        f"{sum(len(r.rounds) for r in records)} rounds; {batch:.1f} sequences a step; {pieces} "
        f"pieces of prompts, {copies} copies, {status.prefix_cache_hits} of "
        f"{status.prefix_cache_queries} tokens found; {loose} loose, {rollbacks} rollbacks, "
        f"{returns} returns"
    )
    assert batch > 4
    assert pieces > len(members) / 2
    assert copies > 10
    assert status.opened_total > 2 * slots, "slots are given up and taken again"
    assert 0.1 < status.prefix_cache_hits / status.prefix_cache_queries < 1
    assert min(rollbacks, loose, returns) > 3


async def test_forty_sessions_are_told_what_each_is_told_alone(target_dir):
    members = [Member(i, longest_output=20) for i in range(40)]
    await check_crowd(target_dir, members, 50, 40, every_scout=10)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4))
async def test_hundreds_of_sessions_are_told_what_each_is_told_alone(target_dir, seed):
    members = [Member(10_000 * (seed + 1) + i, longest_output=80) for i in range(192)]
    await check_crowd(target_dir, members, 72, 64, every_scout=1, padded=bool(seed % 2))
