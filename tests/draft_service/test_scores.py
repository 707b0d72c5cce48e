"""Drafters' scores of tokens they did not draft, and confidence in their own."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from draft_service.drafters.base import Drafter, Scored
from draft_service.drafters.model import ModelDrafter
from draft_service.drafters.multi_level import MultiLevelDrafter
from draft_service.drafters.translated import TranslatedSession
from draft_service.sessions import ClientSession
from flyspec import wire
from flyspec.engine.loading import LoadedModel
from flyspec.engine.model import Draw
from flyspec.lookup import PromptLookup
from flyspec.values.rounds import DistributionSpec, DraftAdvance, DraftChunk, DraftOpen
from flyspec.values.tokens import Drafted, SamplingParams
from tests.draft_service.draft_harness import (
    CONTEXT_LENGTH,
    EOS,
    GREEDY,
    PENALTIES,
    SAMPLINGS,
    SPECS,
    VOCAB_SIZE,
    CountingRunner,
    Service,
    StartService,
    drive,
    lookup_drafter,
)
from tests.draft_service.test_scripted_drafts import sessions_over
from tests.examples import examples
from tests.scripted import ScriptedModel


def run(runner: Any, session: Any, *asked: Any) -> tuple[list[list[bool]], Drafted]:
    """Scores and proposal, as the engine would get them."""
    scores: list[list[bool]] = []
    tokens: list[int] = []
    confidences: list[float] = []
    work = session.propose(*asked)
    item: Any = next(work, None)
    while item is not None:
        if isinstance(item, Draw):
            try:
                item = work.send(runner.draw([item])[0])
            except StopIteration:
                break
            continue
        if isinstance(item, Scored):
            scores.append(list(item.agreements))
        else:
            tokens += item.token_ids
            confidences += item.confidences
        item = next(work, None)
    return scores, Drafted(tokens, confidences=confidences)


def kinds(runner: Any) -> dict[str, Drafter]:
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
def test_a_score_says_what_would_have_been_proposed_there(
    runner: CountingRunner,
    prompt: list[int],
    kind: str,
    sampling: SamplingParams,
    spec: DistributionSpec | None,
) -> None:
    drafter = kinds(runner)[kind]

    def opened(tokens: Sequence[int]) -> Any:
        return drafter.open(DraftOpen(list(tokens), sampling, 3, "", len(prompt), spec))

    session, tokens = opened(prompt), list(prompt)
    for count, most in ((5, 0), (1, 4), (9, 3), (3, 8)):
        appended: list[int] = []
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


def test_the_first_token_of_all_cannot_be_scored(runner: CountingRunner) -> None:
    for kind, drafter in kinds(runner).items():
        session: Any = drafter.open(DraftOpen([5, 6, 7], GREEDY, 0))
        session.move(0, [5, 6, 7, 8])
        ((*scores,),) = run(runner, session, 2, 0.0, 4)[0]
        assert len(scores) == (4 if kind == "prompt_lookup" else 3)
        session.close()


def test_scores_take_one_step(runner: CountingRunner, prompt: list[int]) -> None:
    session = ModelDrafter(runner, []).open(DraftOpen(prompt, GREEDY, 0))
    drive(runner, session, 4)
    session.move(len(prompt), [5, 6, 7, 8, 9])
    before = runner.steps
    run(runner, session, 0, 0.0, 5)
    assert runner.steps == before + 1
    run(runner, session, 3)
    assert runner.steps == before + 4


def test_a_translated_drafter_does_not_score_and_is_not_sure() -> None:
    class Alignment:
        """Agrees with every token of the target."""

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name}: nothing is wanted")

    session = TranslatedSession.__new__(TranslatedSession)
    session._alignment = Alignment()  # type: ignore[assignment]
    assert list(session.propose(0, 0.9, 5)) == []


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.lists(st.integers(0, 3), max_size=12),
    st.integers(0, 6),
)
def test_lookup_follows_as_it_would_have_proposed(
    tokens: list[int], behind: list[int], most: int
) -> None:
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
    kind: Any,
    loaded: LoadedModel,
    runner: CountingRunner,
    prompt: list[int],
    temperature: float,
) -> None:
    sampling = SamplingParams(temperature)
    session = kind(runner, [EOS]).open(DraftOpen(prompt, sampling, 3))
    proposed = run(runner, session, 20)[1]
    tokens = [*prompt, *proposed.token_ids]
    with torch.inference_mode():
        rows = loaded.model(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1].double()
    rows = rows.softmax(-1) if not temperature else (rows / temperature).softmax(-1)
    assert list(proposed.confidences) == pytest.approx(rows.amax(-1).tolist(), rel=1e-6)
    session.close()


@pytest.mark.parametrize("sampling", [SAMPLINGS[2], *PENALTIES])
def test_confidences_of_both_are_the_same(
    runner: CountingRunner, prompt: list[int], sampling: SamplingParams
) -> None:
    found = []
    for drafter in (ModelDrafter(runner, [EOS]), MultiLevelDrafter(runner, [EOS])):
        session = drafter.open(DraftOpen(prompt, sampling, 3))
        found.append(run(runner, session, 20)[1])
        session.close()
    assert found[0].token_ids == found[1].token_ids
    assert list(found[0].confidences) == pytest.approx(list(found[1].confidences), rel=1e-6)


# --- where a proposal ends ------------------------------------------------------------------


def uneven(tokens: Sequence[int]) -> list[float]:
    """Sure of some tokens, less sure of others."""
    digest = hashlib.blake2b(bytes(tokens), digest_size=2).digest()
    favourite, surplus = digest[0] % 31, 2.0 + digest[1] / 40
    return [surplus if token == favourite else 0.0 for token in range(32)]


@contextmanager
def session_of(sessions: Any, tokens: list[int], kind: str) -> Iterator[ClientSession]:
    with sessions.open(DraftOpen(tokens, GREEDY, 0, kind)) as session:
        yield session


async def chunks_of(session: ClientSession, advance: DraftAdvance) -> list[DraftChunk]:
    session.advance(advance, 0)
    chunks = [await session.next_chunk()]
    while not chunks[-1].last:
        chunks.append(await session.next_chunk())
    return chunks


def joined(chunks: Sequence[DraftChunk]) -> tuple[list[int], list[float]]:
    return (
        [token for chunk in chunks for token in chunk.token_ids],
        [float(c) for chunk in chunks for c in chunk.confidences],
    )


def falls_below(confidences: Sequence[float], least: float) -> int:
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
    tokens: list[int], least: float, most: int, chunk_tokens: int, kind: str
) -> None:
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
async def test_scores_come_with_the_first_chunk(chunk_tokens: int) -> None:
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


async def test_over_gRPC_scores_and_confidences_arrive(service: Service, prompt: list[int]) -> None:
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
async def test_what_is_refused(
    service_with: StartService, advance: DraftAdvance, text: str
) -> None:
    async with service_with(max_speculative_tokens=16) as service:
        client = await service.client().open([5, 6, 7, 8, 9])
        await client.call.write(wire.encode(advance))
        code, details = await client.status()
        assert (code, text in details) == (grpc.StatusCode.INVALID_ARGUMENT, True), details
        assert service.active == 0


async def test_a_run_that_lookup_guessed_ends_there_too() -> None:
    text = [9, 10, 11, 12, 13, 14, 3, 9, 10]
    async with sessions_over(ScriptedModel(), 16) as sessions:
        with session_of(sessions, text, "multi_level") as session:
            ids, confidences = joined(await chunks_of(session, DraftAdvance(1, len(text), [], 4)))
            assert ids == [11, 12, 13, 14]
            least = 0.9 * confidences[0]
            advance = DraftAdvance(2, len(text), [], 4, min_confidence=least)
            assert joined(await chunks_of(session, advance))[0] == [11, 12]
