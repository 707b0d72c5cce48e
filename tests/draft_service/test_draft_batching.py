"""Continuous batching of drafts: a session proposes the same in a batch as alone (float64)."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from draft_service.drafters.base import Drafter
from draft_service.drafters.model import ModelDrafter
from draft_service.drafters.multi_level import MultiLevelDrafter
from draft_service.engine import Engine
from draft_service.sessions import ClientSession, Sessions
from flyspec.config import DraftSettings
from flyspec.engine.loading import LoadedModel, load_model
from flyspec.engine.model import Rows, Step
from flyspec.engine.runner import ModelRunner
from flyspec.engine.scheduler import StepBudget
from flyspec.errors import ModelFailureError
from flyspec.values.rounds import DraftAdvance, DraftChunk, DraftOpen
from flyspec.values.tokens import TokenDistribution
from tests.draft_service.draft_harness import (
    CONTEXT_LENGTH,
    EOS,
    GREEDY,
    PENALTIES,
    SAMPLINGS,
    SPECS,
    VOCAB_SIZE,
    drive_all,
    tokens_of,
)
from tests.waiting import until

SMALL = StepBudget(max_tokens=128, prefill_chunk=16)
POISON = [VOCAB_SIZE - 1, VOCAB_SIZE - 1]


class WatchedRunner(ModelRunner):
    """Counts what runs, and fails inside the model on poison."""

    def __init__(self, loaded: LoadedModel, num_slots: int) -> None:
        super().__init__(loaded, num_slots)
        self.poisoned = False
        loaded.model.model.layers[1].register_forward_pre_hook(self._check)
        self.batches: list[int] = []
        self.pieces = self.clashes = 0

    def forward(self, steps: Sequence[Step]) -> list[Rows]:
        self.clashes += len(steps) - len({step.slot for step in steps})
        self.batches.append(len(steps))
        self.pieces += sum(step.num_logits == 0 for step in steps)
        self.poisoned = any(POISON in map(list, pairwise(step.token_ids)) for step in steps)
        return super().forward(steps)

    def _check(self, *_: Any) -> None:
        if self.poisoned:
            raise RuntimeError("poison")


@asynccontextmanager
async def running(
    model_dir: str, slots: int, budget: StepBudget = SMALL
) -> AsyncIterator[tuple[Sessions, WatchedRunner]]:
    """Sessions over their own model; every slot must be free at the end."""
    loaded = load_model(model_dir, "cpu", "float64")
    runner = WatchedRunner(loaded, slots)
    engine = Engine(runner, lambda: torch.set_num_threads(1), budget)
    drafters: list[Drafter] = [ModelDrafter(runner, [EOS]), MultiLevelDrafter(runner, [EOS])]
    await asyncio.wrap_future(engine.start())
    try:
        yield Sessions(drafters, engine, DraftSettings(max_sessions=slots, chunk_tokens=4)), runner
        await until(lambda: runner.cache.num_free == slots)
        assert not runner.clashes
    finally:
        await asyncio.to_thread(engine.stop)


async def propose(session: ClientSession, advance: DraftAdvance) -> list[DraftChunk]:
    """All chunks of a proposal."""
    session.advance(advance, 0)
    chunks: list[DraftChunk] = []
    while not chunks or not chunks[-1].last:
        chunks.append(await asyncio.wait_for(session.next_chunk(), 60))
    return chunks


def some_tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(1, VOCAB_SIZE), k=count)


class Member:
    """A session: its sequence, its moves, and the proposals it got."""

    def __init__(self, number: int) -> None:
        self.rng = rng = random.Random(number)
        shared = some_tokens(random.Random(number % 3), 30)
        text = some_tokens(rng, rng.randint(2, 30))
        tokens = [*shared, *text, *text[: rng.randint(2, 12)]]  # lookup finds something
        self.open = DraftOpen(
            tokens,
            rng.choice([*SAMPLINGS, *PENALTIES]),
            number,
            ("model", "multi_level")[number % 2],
            rng.randint(1, len(tokens)),
            rng.choice([None, *SPECS]),
        )
        self.told: list[tuple[DraftAdvance, list[int], list[TokenDistribution]]] = []

    async def live(self, sessions: Sessions, rounds: int) -> None:
        rng = self.rng
        await asyncio.sleep(rng.uniform(0, 0.05))
        with sessions.open(self.open) as session:
            held = len(self.open.token_ids)
            for round_id in range(rounds):
                keep = held if not self.told else rng.randint(max(1, held - 12), held)
                append = some_tokens(rng, rng.choice([0, 1, 1, 25])) if self.told else []
                if keep + len(append) >= CONTEXT_LENGTH - 20:
                    break
                advance = DraftAdvance(round_id, keep, append, rng.choice([1, 3, 8, 15]))
                chunks = await propose(session, advance)
                tokens = tokens_of(chunks)
                self.told.append((advance, tokens, [q for c in chunks for q in c.distributions]))
                held = keep + len(append) + len(tokens)

    def check(self, drafter: Drafter, runner: ModelRunner) -> None:
        """Query a session that has the model to itself."""
        session = drafter.open(self.open)
        for advance, tokens, distributions in self.told:
            session.move(advance.keep_length, advance.append_token_ids)
            alone, _, others = drive_all(runner, session, advance.max_tokens)
            assert alone == tokens
            assert len(others) == len(distributions)
            for one, other in zip(distributions, others, strict=True):
                assert one.token_ids == other.token_ids
                a, b = (np.frombuffer(q.log_probs, "<f2").astype(float) for q in (one, other))
                assert np.allclose(a, b, rtol=2e-3, atol=1e-6)
        session.close()


def check_alone(model_dir: str, members: Sequence[Member]) -> None:
    runner = ModelRunner(load_model(model_dir, "cpu", "float64"), 1)
    runner.cache.reuse = False
    drafters = {
        "model": ModelDrafter(runner, [EOS]),
        "multi_level": MultiLevelDrafter(runner, [EOS]),
    }
    for member in members:
        member.check(drafters[member.open.drafter], runner)


@pytest.mark.parametrize(
    ("number", "rounds"), [(24, 3), pytest.param(256, 12, marks=pytest.mark.full)]
)
async def test_a_crowd_is_proposed_what_each_is_proposed_alone(
    model_dir: str, number: int, rounds: int
) -> None:
    members = [Member(i) for i in range(number)]
    room = asyncio.Semaphore(16)
    async with running(model_dir, 16) as (sessions, runner):

        async def live(member: Member) -> None:
            async with room:
                await member.live(sessions, rounds)

        await asyncio.gather(*(live(member) for member in members))
        batch, pieces = statistics.mean(runner.batches), runner.pieces
        hits, queries = runner.cache.hits, runner.cache.queries
    print(f"{batch:.1f} sequences a step, {pieces} pieces, {hits} of {queries} tokens found")
    assert batch > 4
    assert pieces > number / 2
    assert 0 < hits < queries
    check_alone(model_dir, members)


async def test_a_step_that_fails_fails_one_proposal(model_dir: str) -> None:
    rng = random.Random(2)
    async with running(model_dir, 12, StepBudget()) as (sessions, _):
        members = [Member(i) for i in range(8)]
        prefix = some_tokens(rng, 40)
        with (
            sessions.open(DraftOpen([*prefix, *POISON, *prefix], GREEDY, 1)) as victim,
            sessions.open(DraftOpen(prefix, GREEDY, 1, "multi_level")) as other,
        ):
            work = [asyncio.create_task(member.live(sessions, 3)) for member in members]
            for session, length, append in ((victim, 82, []), (other, 40, POISON)):
                with pytest.raises(ModelFailureError, match="RuntimeError: poison"):
                    await propose(session, DraftAdvance(1, length, append, 4))
            await asyncio.gather(*work)
            # What the failed step left behind is nobody's prefix.
            again = Member(50)
            again.open = DraftOpen([*prefix, 5, 6, 7], GREEDY, 3, "model")
            await again.live(sessions, 2)
    check_alone(model_dir, [*members, again])
