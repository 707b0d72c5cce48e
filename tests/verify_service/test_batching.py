"""Continuous batching: sessions are told the same as alone, also where others fail."""

from __future__ import annotations

import asyncio
import collections
import random
import statistics
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from flyspec.engine.model import Rows, Step
from flyspec.engine.scheduler import StepBudget
from flyspec.errors import ModelFailureError, ResourceExhaustedError
from flyspec.values.rounds import VerifyOpen, VerifyRound
from flyspec.values.tokens import SamplingParams
from tests.verify_service.crowd import EXACT, CountingRunner, Member, Record, no_sessions, running
from tests.verify_service.sessions import answers
from tests.waiting import until

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
    assert min(rollbacks, loose, returns) > 0


async def test_forty_sessions_are_told_what_each_is_told_alone(target_dir):
    members = [Member(i, longest_output=20) for i in range(40)]
    await check_crowd(target_dir, members, 50, 40, every_scout=10)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4))
async def test_hundreds_of_sessions_are_told_what_each_is_told_alone(target_dir, seed):
    members = [Member(10_000 * (seed + 1) + i, longest_output=80) for i in range(192)]
    await check_crowd(target_dir, members, 72, 64, every_scout=1, padded=bool(seed % 2))


POISON = [2, 2]


def some_tokens(count: int, seed: int) -> list[int]:
    return [0, *random.Random(seed).choices(range(3, 400), k=count - 1)]


def opening(tokens: list[int]) -> VerifyOpen:
    return VerifyOpen(tokens, len(tokens), EXACT, SamplingParams(), 0)


class GatedRunner(CountingRunner):
    """Runs a step when the gate permits, and records it: how many tokens of which slot."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gate, self.entered = threading.Semaphore(0), 0
        self.ran: list[dict[int, int]] = []

    def forward(self, steps: Sequence[Step]) -> list[Rows]:
        self.entered += 1
        self.gate.acquire()
        self.ran.append({step.slot: len(step.token_ids) for step in steps})
        return super().forward(steps)

    def open_gate(self):
        self.gate.release(100_000)

    async def at_gate(self, step: int):
        """Wait until the engine's thread is about to run step `step`, from 1."""
        await until(lambda: self.entered >= step)


class FragileRunner(GatedRunner):
    """Fails inside the model if a step contains the poison."""

    def __init__(self, loaded, *args, **kwargs):
        super().__init__(loaded, *args, **kwargs)
        self.poisoned = False
        loaded.model.model.layers[1].register_forward_pre_hook(self._check)

    def forward(self, steps: Sequence[Step]) -> list[Rows]:
        self.poisoned = any(
            step.token_ids[i : i + 2] == POISON
            for step in steps
            for i in range(len(step.token_ids))
        )
        return super().forward(steps)

    def _check(self, *_):
        if self.poisoned:
            raise RuntimeError("poison")


async def alone(target_dir, *records):
    """Compare the answers with those of an engine that serves nothing else."""
    async with running(target_dir, 1) as (engine, runner):
        runner.cache.reuse = False
        for record in records:
            await record.check(engine)


async def rounds(engine, record, count):
    """Run some rounds of a session, each with drafts that cannot all be right; then close it."""
    session, length = engine.open(record.open), len(record.open.token_ids)
    for round_id in range(count):
        drafts = some_tokens(4, round_id)
        (verdict,) = await record.ask(engine, session, VerifyRound(round_id, length, [], drafts))
        length = verdict.keep_length + 1
    engine.close(session)


async def test_a_step_that_fails_fails_one_session(target_dir):
    prefix, tail = some_tokens(40, 1), some_tokens(20, 2)
    async with running(target_dir, 8, runner_class=FragileRunner) as (engine, runner):
        others = [Record(opening([*some_tokens(20, 10 + i), *prefix])) for i in range(5)]
        work = [asyncio.create_task(rounds(engine, record, 4)) for record in others]
        victim = engine.open(opening([*prefix, *POISON, *tail]))
        bad = asyncio.create_task(answers(engine, victim, VerifyRound(1, 62, [], [5, 6])))
        await runner.at_gate(1)
        runner.open_gate()
        with pytest.raises(ModelFailureError, match="RuntimeError: poison"):
            await bad
        # Fails where its slot held something else before.
        changing, text = engine.open(opening(some_tokens(60, 3))), some_tokens(20, 4)
        await answers(engine, changing, VerifyRound(1, 60, [], [9, 9]))
        with pytest.raises(ModelFailureError, match="RuntimeError: poison"):
            await answers(engine, changing, VerifyRound(2, 30, text, POISON))
        await asyncio.gather(*work)
        assert max(runner.batches) >= 6
        # What the failed step left in its slots is nobody's prefix: not another session's, while
        # the victim is there and after, and not its own.
        again = [Record(opening([*prefix, *tail])) for _ in range(2)]
        again += [Record(opening(some_tokens(60, 3))) for _ in range(2)]
        await rounds(engine, again[0], 2)
        await rounds(engine, again[2], 2)
        same = Record(opening(some_tokens(60, 3)[:30] + text))
        await same.ask(engine, changing, VerifyRound(3, 30, text, [9, 9, 9]))
        same.rounds = [(replace(r, keep_length=50, append_token_ids=[]), *rest)
                       for r, *rest in same.rounds]  # fmt: skip
        for session in (victim, changing):
            engine.close(session)
        await rounds(engine, again[1], 2)
        await rounds(engine, again[3], 2)
        await no_sessions(engine, runner)
    await alone(target_dir, *others, *again, same)


@pytest.mark.parametrize("drafts", [[5, 6], []], ids=["drafts", "plain"])
async def test_logits_that_are_not_finite_are_no_verdict(target_dir, drafts):
    async with running(target_dir, 4) as (engine, runner):
        weights = runner.model.model.norm.weight
        well = weights.detach().clone()
        weights.data.fill_(float("nan"))
        session, round_ = engine.open(opening(some_tokens(40, 1))), VerifyRound(1, 40, [], drafts)
        with pytest.raises(ModelFailureError, match="the logits are not finite"):
            await answers(engine, session, round_)
        assert runner.cache.held(session.slot) == [], "nobody builds on that"
        assert engine.failures.num_total == 1
        weights.data.copy_(well)
        assert await answers(engine, session, replace(round_, round_id=2))
        assert not engine.failures.lost.done()


async def test_a_session_that_leaves_in_mid_prompt_leaves_its_slot(target_dir):
    budget = StepBudget(max_tokens=128, prefill_chunk=16)
    async with running(target_dir, 4, budget, GatedRunner) as (engine, runner):
        leaving = engine.open(opening(some_tokens(200, 1)))
        unheard = engine.submit(leaving, VerifyRound(1, 200, [], [5]))
        staying = Record(opening(some_tokens(180, 2)))
        work = asyncio.create_task(rounds(engine, staying, 3))
        await runner.at_gate(1)
        runner.gate.release(3)
        await runner.at_gate(4)
        assert runner.pieces >= 3
        engine.close(leaving)
        # What comes next shares a prefix with what the slot holds by now, and goes on beyond it.
        sharing = Record(opening([*some_tokens(200, 1)[:150], 7, 8]))
        more = asyncio.create_task(rounds(engine, sharing, 2))
        runner.open_gate()
        await asyncio.gather(work, more)
        await no_sessions(engine, runner)
        assert 0 < runner.cache.hits < 150
        assert unheard.empty(), "its round was given up"
    await alone(target_dir, staying, sharing)


async def test_the_queue_is_bounded_and_says_what_to_do(target_dir):
    async with running(target_dir, 8, None, GatedRunner, max_queue=4) as (engine, runner):
        sessions = [engine.open(opening(some_tokens(9, i))) for i in range(6)]
        round_ = VerifyRound(1, 9, [], [5])
        waiting = [engine.submit(sessions[0], round_)]
        await runner.at_gate(1)
        waiting += [engine.submit(session, round_) for session in sessions[1:5]]
        with pytest.raises(ResourceExhaustedError, match=r"4 rounds are waiting.*--max-queue"):
            engine.submit(sessions[5], round_)
        runner.open_gate()
        for inbox in waiting:
            assert (await asyncio.wait_for(inbox.get(), 120)).last
        assert len(await answers(engine, sessions[5], round_)) == 1
        for session in sessions:
            engine.close(session)
        await no_sessions(engine, runner)


async def test_under_overload_everybody_moves_and_a_long_prompt_too(target_dir):
    budget = StepBudget(max_tokens=128, prefill_chunk=16)
    async with running(target_dir, 40, budget, GatedRunner) as (engine, runner):
        counts, enough = collections.Counter(), asyncio.Event()

        async def hurry(number: int) -> None:
            tokens = some_tokens(9, number)
            session, length = engine.open(opening(tokens)), len(tokens)
            while not enough.is_set():
                drafts = [5] * 9
                (verdict,) = await answers(engine, session, VerifyRound(1, length, [], drafts))
                length = min(verdict.keep_length + 1, 200)
                counts[number] += 1
            engine.close(session)

        runner.open_gate()
        work = [asyncio.create_task(hurry(i)) for i in range(32)]
        await until(lambda: len(counts) == 32)
        prompt = engine.open(opening(some_tokens(200, 99)))
        await answers(engine, prompt, VerifyRound(1, 200, [], []))
        await until(lambda: sum(counts.values()) >= 640)
        enough.set()
        await asyncio.gather(*work)
        pieces = [i for i, ran in enumerate(runner.ran) if prompt.slot in ran]
        engine.close(prompt)
        await no_sessions(engine, runner)
    assert max(sum(ran.values()) for ran in runner.ran) <= budget.max_tokens
    # The prompt is in every step from its first to its last, and no step has more than a chunk.
    assert pieces == list(range(pieces[0], pieces[0] + len(pieces)))
    assert [runner.ran[i][prompt.slot] for i in pieces] == [16] * 12 + [8]
    assert max(counts.values()) <= 2 * min(counts.values())
