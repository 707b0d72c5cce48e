"""Proposals: chunks, ends, scores of tokens not drafted, and confidence in their own."""

import asyncio
import hashlib
import math
import time
from contextlib import asynccontextmanager, contextmanager

import grpc
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from draft_service.drafters.model import ModelDrafter
from draft_service.drafters.multi_level import MultiLevelDrafter
from draft_service.sessions import Engine, Sessions
from flyspec import wire
from flyspec.config import DraftSettings
from flyspec.lookup import PromptLookup
from flyspec.values.rounds import DraftAdvance, DraftOpen
from flyspec.values.tokens import Origin, SamplingParams
from tests.draft_service.draft_harness import (
    EOS,
    GREEDY,
    PENALTIES,
    SAMPLINGS,
    SPECS,
    drive,
    lookup_drafter,
    run,
    tokens_of,
)
from tests.examples import examples
from tests.scripted import ScriptedModel
from tests.tiny import CONTEXT_LENGTH, VOCAB_SIZE

END = 31


@asynccontextmanager
async def sessions_over(model, chunk_tokens):
    engine = Engine(model)
    await asyncio.wrap_future(engine.start())
    drafters = [ModelDrafter(model, [END]), MultiLevelDrafter(model, [END])]
    try:
        yield Sessions(drafters, engine, DraftSettings(chunk_tokens=chunk_tokens))
    finally:
        await asyncio.to_thread(engine.stop)


async def proposal(session, keep, append=(), most=10, limit_ms=0):
    session.advance(DraftAdvance(1, keep, append, most, time_limit_ms=limit_ms), 0)
    chunks = [await asyncio.wait_for(session.next_chunk(), 10)]
    while not chunks[-1].last:
        chunks.append(await asyncio.wait_for(session.next_chunk(), 10))
    return chunks


@pytest.mark.parametrize("chunk_tokens", [1, 4, 16])
async def test_a_proposal_comes_in_chunks_of_whole_calls(chunk_tokens):
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
            assert tokens_of(await proposal(session, 5, [28])) == [29, 30, END]
    assert model.cache.num_free == 4


@pytest.mark.parametrize("chunk_tokens", [1, 16])
@pytest.mark.parametrize("num_in_time", [1, 4])
async def test_a_proposal_ends_at_its_time_limit_with_what_it_has(
    chunk_tokens, num_in_time, monkeypatch
):
    model = ScriptedModel()
    forward = model.forward
    async with sessions_over(model, chunk_tokens) as sessions:
        with sessions.open(DraftOpen([2, 3], GREEDY, 0, "model")) as session:

            def late(steps):
                """The step of the last token in time takes until the time is over."""
                while len(model.calls) == num_in_time - 1 and not session._state.overdue:
                    time.sleep(0.001)
                return forward(steps)

            monkeypatch.setattr(model, "forward", late)
            drafts = tokens_of(await proposal(session, 2, most=25, limit_ms=300))
            assert num_in_time <= len(drafts) < 25, "at least one, and not all"
            assert drafts == [*range(4, 29)][: len(drafts)]
            assert len(tokens_of(await proposal(session, 2, most=25))) == 25, "it was for that one"


def kinds(runner):
    return {
        "model": ModelDrafter(runner, [EOS]),
        "multi_level": MultiLevelDrafter(runner, [EOS]),
        "prompt_lookup": lookup_drafter(CONTEXT_LENGTH),
    }


@pytest.mark.parametrize(
    ("kind", "sampling", "spec"),
    [
        ("model", GREEDY, None),
        ("model", PENALTIES[1], SPECS[0]),
        ("multi_level", SAMPLINGS[2], SPECS[0]),
        ("multi_level", PENALTIES[0], None),
        ("prompt_lookup", GREEDY, None),
    ],
)
def test_a_score_says_what_would_have_been_proposed_there(runner, prompt, kind, sampling, spec):
    drafter = kinds(runner)[kind]

    def opened(tokens):
        return drafter.open(DraftOpen(list(tokens), sampling, 3, "", len(prompt), spec))

    session, tokens = opened(prompt), list(prompt)
    for count, most in ((5, 0), (1, 4), (9, 3), (3, 8)):
        appended = []
        while len(appended) < count:  # some of its own, some of another's
            fresh = opened([*tokens, *appended])
            own = drive(runner, fresh, 1)[0]
            fresh.close()
            other = [(7 * len(tokens) + len(appended)) % 90 + 5]
            appended += own if own and len(appended) % 3 else other
        expected = []
        for index, token in enumerate(appended):
            fresh = opened([*tokens, *appended[:index]])
            expected.append(drive(runner, fresh, 1)[0] == [token])
            fresh.close()
        session.move(len(tokens), appended)
        tokens += appended
        scores, proposed = run(runner, session, most, 0.0, count)
        assert scores == [expected]
        fresh = opened(tokens)
        assert proposed.token_ids == drive(runner, fresh, most)[0]
        fresh.close()
        # What is asked next builds on all of it.
        tokens += proposed.token_ids
        assert list(session.token_ids) == tokens
    session.close()


def test_scores_take_one_step(runner, prompt):
    session = ModelDrafter(runner, []).open(DraftOpen(prompt, GREEDY, 0))
    drive(runner, session, 4)
    session.move(len(prompt), [5, 6, 7, 8, 9])
    before = runner.steps
    run(runner, session, 0, 0.0, 5)
    assert runner.steps == before + 1
    run(runner, session, 3)
    assert runner.steps == before + 4


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.lists(st.integers(0, 3), max_size=12),
    st.integers(0, 6),
)
def test_lookup_follows_as_it_would_have_proposed(tokens, behind, most):
    session = lookup_drafter().open(DraftOpen(tokens, GREEDY, 0))
    session.move(len(tokens), behind)
    expected = [
        PromptLookup([*tokens, *behind[:i]]).propose(1) == [token] for i, token in enumerate(behind)
    ]
    scores, proposed = run(None, session, most, 0.5, len(behind))
    assert scores == ([expected] if behind else [])
    assert proposed.token_ids == PromptLookup([*tokens, *behind]).propose(most)
    assert proposed.confidences == []


# --- confidences ----------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "temperature"), [(ModelDrafter, 0.0), (MultiLevelDrafter, 0.7)])
def test_confidences_are_those_of_the_model_in_its_likeliest_tokens(
    kind, loaded, runner, prompt, temperature
):
    sampling = SamplingParams(temperature)
    session = kind(runner, [EOS]).open(DraftOpen(prompt, sampling, 3))
    proposed = run(runner, session, 20)[1]
    tokens = [*prompt, *proposed.token_ids]
    with torch.inference_mode():
        rows = loaded.model(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1].double()
    rows = rows.softmax(-1) if not temperature else (rows / temperature).softmax(-1)
    assert list(proposed.confidences) == pytest.approx(rows.amax(-1).tolist(), rel=1e-6)
    session.close()


# --- where a proposal ends ------------------------------------------------------------------


def uneven(tokens):
    """Sure of some tokens, less sure of others."""
    digest = hashlib.blake2b(bytes(tokens), digest_size=2).digest()
    favourite, surplus = digest[0] % 31, 2.0 + digest[1] / 40
    return [surplus if token == favourite else 0.0 for token in range(32)]


@contextmanager
def session_of(sessions, tokens, kind):
    with sessions.open(DraftOpen(tokens, GREEDY, 0, kind)) as session:
        yield session


async def chunks_of(session, advance):
    session.advance(advance, 0)
    chunks = [await session.next_chunk()]
    while not chunks[-1].last:
        chunks.append(await session.next_chunk())
    return chunks


def joined(chunks):
    return (
        [token for chunk in chunks for token in chunk.token_ids],
        [float(c) for chunk in chunks for c in chunk.confidences],
    )


def falls_below(confidences, least):
    """Tokens up to the one at which the product falls below."""
    for count in range(1, len(confidences) + 1):
        if math.prod(confidences[:count]) < least:
            return count
    return len(confidences)


@given(
    tokens=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    least=st.floats(0, 1),
    most=st.integers(0, 12),
    chunk_tokens=st.sampled_from([1, 2, 3, 16]),
    kind=st.sampled_from(["model", "multi_level"]),
)
@settings(max_examples=examples(25))
async def test_a_proposal_ends_behind_the_token_with_which_it_gets_too_unlikely(
    tokens, least, most, chunk_tokens, kind
):
    async with sessions_over(ScriptedModel(uneven), chunk_tokens) as sessions:
        with session_of(sessions, tokens, kind) as session:
            whole = await chunks_of(session, DraftAdvance(1, len(tokens), [], most))
            ids, confidences = joined(whole)
            assert len(confidences) == len(ids)
            products = [math.prod(confidences[:n]) for n in range(1, len(ids) + 1)]
            assume(all(abs(p - least) > 1e-9 for p in products))
            advance = DraftAdvance(2, len(tokens), [], most, min_confidence=least)
            ended, sure = joined(await chunks_of(session, advance))
            count = falls_below(confidences, least)
            assert ended == ids[:count]
            assert sure == pytest.approx(confidences[:count])


@pytest.mark.parametrize("chunk_tokens", [1, 2, 16])
async def test_scores_come_with_the_first_chunk(chunk_tokens):
    async with sessions_over(ScriptedModel(), chunk_tokens) as sessions:
        with session_of(sessions, [5, 6], "model") as session:
            advance = DraftAdvance(1, 2, [7, 9, 10], 5, score=True)
            first, *others = await chunks_of(session, advance)
            assert list(first.agreements) == [True, False, True]
            assert not any(chunk.agreements for chunk in others)
            advance = DraftAdvance(2, 5, [11, 3], 0, score=True)
            (only,) = await chunks_of(session, advance)
            assert (list(only.agreements), only.token_ids) == ([True, False], [])
            (only,) = await chunks_of(session, DraftAdvance(3, 7, [], 0, score=True))
            assert list(only.agreements) == []


# --- over gRPC ------------------------------------------------------------------------------


async def test_over_gRPC_scores_and_confidences_arrive(service, prompt):
    client = await service.client().open(prompt)
    (*_, whole) = await client.advance(len(prompt), max_tokens=5)
    assert len(whole.confidences) == len(whole.token_ids)
    assert all(0 < c <= 1 for c in whole.confidences)
    appended = [*whole.token_ids[:2], (whole.token_ids[2] + 1) % VOCAB_SIZE]
    advance = DraftAdvance(2, len(prompt), appended, 3, "", 0.0, True)
    await client.call.write(wire.encode(advance))
    assert list((await client.read()).agreements) == [True, True, False]
    # The first token of a sequence follows nothing that could be asked for it.
    await client.call.write(wire.encode(DraftAdvance(3, 0, [5], 3, "", 0.0, True)))
    last = await client.read()
    assert (list(last.agreements), len(last.token_ids)) == ([], 3)
    await client.call.done_writing()


@pytest.mark.parametrize(
    ("advance", "text"),
    [
        *(
            (DraftAdvance(1, 5, [], 3, "", least), "min_confidence must be between 0 and 1")
            for least in (-0.1, 1.5, math.nan, math.inf)
        ),
        (DraftAdvance(1, 5, [7] * 65, 3, "", 0.0, True), "advance.score: 65 tokens"),
    ],
)
async def test_what_is_refused(service_with, advance, text):
    async with service_with(max_speculative_tokens=16) as service:
        client = await service.client().open([5, 6, 7, 8, 9])
        await client.call.write(wire.encode(advance))
        code, details = await client.status()
        assert (code, text in details) == (grpc.StatusCode.INVALID_ARGUMENT, True), details
        assert service.active == 0


async def test_a_run_that_lookup_guessed_ends_there_too():
    text = [9, 10, 11, 12, 13, 14, 3, 9, 10]
    async with sessions_over(ScriptedModel(), 16) as sessions:
        with session_of(sessions, text, "multi_level") as session:
            ids, confidences = joined(await chunks_of(session, DraftAdvance(1, len(text), [], 4)))
            assert ids == [11, 12, 13, 14]
            least = 0.9 * confidences[0]
            advance = DraftAdvance(2, len(text), [], 4, min_confidence=least)
            assert joined(await chunks_of(session, advance))[0] == [11, 12]
