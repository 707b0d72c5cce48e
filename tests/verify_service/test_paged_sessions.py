"""Sessions over few blocks of cache: the same texts as over plenty, though some are lost."""

import asyncio
import random

import pytest

from flyspec.engine.loading import load_model
from flyspec.engine.pages import PageTable
from flyspec.engine.runner import ModelRunner, Paging
from flyspec.engine.scheduler import StepBudget
from flyspec.errors import ResourceExhaustedError
from flyspec.rules import Rule
from flyspec.values.rounds import VerifyOpen, VerifyRound
from flyspec.values.tokens import SamplingParams
from tests.engine.random_models import eagerly
from tests.scripted import ScriptedModel
from tests.verify_service.sessions import answers, engine_over, tokenizer_of

SLOTS, LENGTH, SIZE = 6, 80, 4
WIDTH = LENGTH // SIZE


def opening(tokens, waited_ms=None):
    return VerifyOpen(tokens, len(tokens), Rule("exact"), SamplingParams(), 0, waited_ms=waited_ms)


async def test_a_session_waits_until_the_blocks_of_others_are_free():
    cache = PageTable(SLOTS, LENGTH, WIDTH, SIZE)
    model = ScriptedModel(num_slots=SLOTS, context_length=LENGTH, cache=cache)
    async with engine_over(model, tokenizer_of()) as engine:
        first = engine.open(opening([1] * 50))
        with pytest.raises(ResourceExhaustedError, match="--kv-cache-memory-bytes"):
            engine.open(opening([2] * 30))
        await answers(engine, first, VerifyRound(1, 50, [], [1]))
        waiting = asyncio.create_task(engine.open_in_turn(opening([2] * 30, waited_ms=0)))
        await asyncio.sleep(0)
        assert (engine.sessions.active, engine.sessions.waiting) == (1, 1)
        engine.close(first)
        second = await asyncio.wait_for(waiting, 10)
        await answers(engine, second, VerifyRound(1, 30, [], [1]))
        engine.open(opening([3] * 30))
        assert (engine.sessions.active, engine.sessions.waiting) == (2, 0)


async def test_texts_do_not_depend_on_the_memory_there_is(target_dir, loaded, greedy):
    """Six sessions of up to 140 tokens in the blocks of one context of 256, in fixed shapes."""
    paging = Paging(16, 18, "sdpa")
    runner = ModelRunner(load_model(target_dir, "cpu", "float64"), 6, paging=paging)
    runner.accelerate(eagerly, compiled=False)
    runner.cache.forget()

    async def text(seed):
        rng = random.Random(seed)
        prompt = [0, *(rng.randrange(3, 400) for _ in range(20 * seed))]
        expected = greedy(prompt, 20)
        tokens = [*prompt]
        session = await engine.open_in_turn(opening(tokens, waited_ms=0))
        for number in range(100):
            done = len(tokens) - len(prompt)
            if done >= len(expected):
                break
            right = expected[done : done + 5]
            drafts = [t if rng.random() < 0.8 else 7 for t in right] if seed % 2 else []
            round_ = VerifyRound(number, len(tokens), [], drafts, max_plain_tokens=4)
            for verdict in await answers(engine, session, round_):
                kept = verdict.keep_length - len(tokens)
                tokens += [*drafts[: max(0, kept)], verdict.next_token_id]
        engine.close(session)
        return tokens[len(prompt) :][: len(expected)], expected

    options = {"budget": StepBudget(prefill_chunk=16), "max_waiting": 6}
    async with engine_over(runner, loaded.tokenizer, **options) as engine:
        for got, expected in await asyncio.gather(*(text(seed) for seed in range(1, 7))):
            assert got == expected
        assert runner.cache.preemptions > 0
