"""The draft engine and its drafters over a scripted model: no torch module, no files, no port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from draft_service.drafters.model import ModelDrafter
from draft_service.drafters.multi_level import MultiLevelDrafter
from draft_service.sessions import ClientSession, Engine, Sessions
from flyspec.config import DraftSettings
from flyspec.engine.model import Rows, Step
from flyspec.values.rounds import DraftAdvance, DraftChunk, DraftOpen
from flyspec.values.tokens import Origin
from tests.draft_service.draft_harness import GREEDY, tokens_of
from tests.scripted import ScriptedModel

EOS = 31


@asynccontextmanager
async def sessions_over(model: ScriptedModel, chunk_tokens: int) -> AsyncIterator[Sessions]:
    engine = Engine(model)
    await asyncio.wrap_future(engine.start())
    drafters = [ModelDrafter(model, [EOS]), MultiLevelDrafter(model, [EOS])]
    try:
        yield Sessions(drafters, engine, DraftSettings(chunk_tokens=chunk_tokens))
    finally:
        await asyncio.to_thread(engine.stop)


async def proposal(
    session: ClientSession,
    keep: int,
    append: Sequence[int] = (),
    most: int = 10,
    limit_ms: int = 0,
) -> list[DraftChunk]:
    session.advance(DraftAdvance(1, keep, append, most, time_limit_ms=limit_ms), 0)
    chunks = [await asyncio.wait_for(session.next_chunk(), 10)]
    while not chunks[-1].last:
        chunks.append(await asyncio.wait_for(session.next_chunk(), 10))
    return chunks


@pytest.mark.parametrize("chunk_tokens", [1, 4, 16])
async def test_a_proposal_comes_in_chunks_of_whole_calls(chunk_tokens: int) -> None:
    model = ScriptedModel()
    async with sessions_over(model, chunk_tokens) as sessions:
        with sessions.open(DraftOpen([5, 6], GREEDY, 0, "model")) as session:
            chunks = await proposal(session, 2)
            assert tokens_of(chunks) == list(range(7, 17))
            sizes = [len(chunk.token_ids) for chunk in chunks]
            assert sizes == {1: [1] * 10, 4: [4, 4, 2], 16: [10]}[chunk_tokens]
            assert {origin for chunk in chunks for origin in chunk.origins} == {Origin.EXACT_MODEL}
            # Two of them stand, then another token: only that one is run before the next.
            before = len(model.calls)
            assert tokens_of(await proposal(session, 4, [20], 3)) == [21, 22, 23]
            assert [step.token_ids for (step,) in model.calls[before:]] == [[20], [21], [22]]
            assert tokens_of(await proposal(session, 5, [28])) == [29, 30, EOS]
    assert model.cache.num_free == 4


async def test_guesses_are_checked_in_one_step() -> None:
    model = ScriptedModel()
    text = [9, 10, 11, 12, 13, 14, 3, 9, 10]
    async with sessions_over(model, 16) as sessions:
        with sessions.open(DraftOpen(text, GREEDY, 0, "multi_level")) as session:
            (chunk,) = await proposal(session, len(text), most=5)
    assert chunk.token_ids == [11, 12, 13, 14, 15]
    assert chunk.origins == [Origin.EXACT_LOOKUP] * 4 + [Origin.EXACT_MODEL]
    assert len(model.calls) < 5


@pytest.mark.parametrize("chunk_tokens", [1, 16])
@pytest.mark.parametrize("num_in_time", [1, 4])
async def test_a_proposal_ends_at_its_time_limit_with_what_it_has(
    chunk_tokens: int, num_in_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ScriptedModel()
    forward = model.forward
    async with sessions_over(model, chunk_tokens) as sessions:
        with sessions.open(DraftOpen([2, 3], GREEDY, 0, "model")) as session:

            def late(steps: Sequence[Step]) -> list[Rows]:
                """The step of the last token in time takes until the time is over."""
                while len(model.calls) == num_in_time - 1 and not session._state.overdue:
                    time.sleep(0.001)
                return forward(steps)

            monkeypatch.setattr(model, "forward", late)
            drafts = tokens_of(await proposal(session, 2, most=25, limit_ms=1))
            assert num_in_time <= len(drafts) < 25, "at least one, and not all"
            assert drafts == [*range(4, 29)][: len(drafts)]
            assert len(tokens_of(await proposal(session, 2, most=25))) == 25, "it was for that one"
