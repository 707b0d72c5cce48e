"""The engine against transformers' own greedy generate, in float64."""

from __future__ import annotations

import random

import pytest

from flyspec.errors import (
    InvalidArgumentError,
    PrefixMismatchError,
)
from flyspec.prefix import TokenSequence
from flyspec.values.rounds import VerifyOpen, VerifyRound
from flyspec.values.tokens import SamplingParams
from tests.verify_service.conftest import CACHES
from tests.verify_service.sessions import EXACT, GREEDY, PROMPT, answers, opening


async def speculate(engine, session, sequence, num_tokens, propose):
    """Rounds with drafts from `propose(tokens)` until `num_tokens` more are there."""
    start = len(sequence)
    round_id = 0
    while len(sequence) < start + num_tokens:
        round_id += 1
        drafts = propose(sequence.tokens)
        (verdict,) = await answers(
            engine,
            session,
            VerifyRound(round_id, len(sequence), [], drafts, prefix_hash=sequence.hash),
        )
        accepted = verdict.keep_length - len(sequence)
        sequence.extend([*drafts[:accepted], verdict.next_token_id])
    return sequence.tokens[start : start + num_tokens]


async def test_plain_decoding_streams_what_generate_gives(engine, greedy):
    session = engine.open(opening(PROMPT))
    verdicts = await answers(
        engine, session, VerifyRound(1, len(PROMPT), [], [], max_plain_tokens=40)
    )
    tokens = [v.next_token_id for v in verdicts]
    assert tokens == greedy(PROMPT, 40)
    assert [v.keep_length for v in verdicts] == [len(PROMPT) + i for i in range(len(tokens))]
    assert [v.last for v in verdicts] == [False] * (len(tokens) - 1) + [True]
    engine.close(session)


@pytest.mark.parametrize("engine", CACHES, indirect=True)
@pytest.mark.parametrize(("k", "quality"), [(1, 0.8), (4, 0.0), (15, 0.9)])
async def test_drafts_of_any_quality_leave_the_text_alone(engine, greedy, k, quality):
    expected = greedy(PROMPT, 30)
    rng = random.Random(k)

    def propose(tokens):
        done = len(tokens) - len(PROMPT)
        right = expected[done : done + k]
        return [t if rng.random() < quality else rng.randrange(3, 400) for t in right] or [5]

    session = engine.open(opening(PROMPT))
    got = await speculate(engine, session, TokenSequence(PROMPT), len(expected) - 1, propose)
    assert got == expected[: len(got)]
    engine.close(session)


@pytest.mark.parametrize("engine", CACHES, indirect=True)
async def test_rollback_is_a_length(engine, greedy):
    """Any truncation, at any time, gives what a fresh session gives."""
    rng = random.Random(7)
    session, sequence = engine.open(opening(PROMPT)), TokenSequence(PROMPT)
    for round_id in range(1, 16):
        keep = rng.randint(1, len(sequence))
        append = [rng.randrange(3, 400) for _ in range(rng.randint(0, 3))]
        drafts = [rng.randrange(3, 400) for _ in range(rng.randint(0, 5))]
        sequence.keep(keep)
        sequence.extend(append)
        before = list(sequence.tokens)
        (verdict,) = await answers(
            engine, session, VerifyRound(round_id, keep, append, drafts, sequence.hash)
        )
        accepted = verdict.keep_length - len(before)
        sequence.extend([*drafts[:accepted], verdict.next_token_id])
        # The next token is the target's own, and a draft stands only where it is that too.
        assert greedy(sequence.tokens[:-1], 1)[0] == verdict.next_token_id
        for i in range(accepted):
            assert greedy([*before, *drafts[:i]], 1)[0] == drafts[i]
    engine.close(session)


async def test_another_prefix_is_refused_and_the_engine_lives_on(engine, greedy):
    session = engine.open(opening(PROMPT))
    with pytest.raises(PrefixMismatchError, match="holds 8 tokens"):
        await answers(engine, session, VerifyRound(1, 9, [], []))
    with pytest.raises(PrefixMismatchError, match="prefix_hash"):
        await answers(engine, session, VerifyRound(2, len(PROMPT), [], [], prefix_hash=12345))
    with pytest.raises(InvalidArgumentError, match="out of range"):
        await answers(engine, session, VerifyRound(3, len(PROMPT), [], [400]))
    with pytest.raises(InvalidArgumentError, match="context"):
        await answers(engine, session, VerifyRound(4, len(PROMPT), [9] * 250, []))
    engine.close(session)
    session = engine.open(opening(PROMPT))
    (verdict,) = await answers(engine, session, VerifyRound(1, len(PROMPT), [], []))
    assert [verdict.next_token_id] == greedy(PROMPT, 1)
    engine.close(session)


@pytest.mark.parametrize(
    ("open_", "message"),
    [
        (VerifyOpen([5, 6], 3, EXACT, GREEDY, 0), "prompt_length"),
        (opening([5], sampling=SamplingParams(temperature=-1)), "temperature"),
    ],
)
async def test_bad_openings_are_refused_by_name(engine, open_, message):
    with pytest.raises(InvalidArgumentError, match=message):
        engine.open(open_)
    assert engine.sessions.active == 0


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(0.7, 0.9, 50),
        SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
        SamplingParams(0.8, min_p=0.02, presence_penalty=0.5, min_tokens=20),
        SamplingParams(1.0, logit_bias=((7, 4.0), (9, -100.0))),
    ],
)
async def test_sampling_does_not_depend_on_drafts(engine, sampling):
    """The same seed gives the same text whatever was drafted.

    Each row of a round counts the drafts before it, as plain decoding counts its tokens.
    """
    session = engine.open(opening(PROMPT, sampling=sampling, seed=99))
    verdicts = await answers(
        engine, session, VerifyRound(1, len(PROMPT), [], [], max_plain_tokens=40)
    )
    plain = [v.next_token_id for v in verdicts]
    engine.close(session)
    assert len(set(plain)) > 5
    rng = random.Random(0)
    for k in (1, 15):

        def propose(tokens, k=k):
            done = len(tokens) - len(PROMPT)
            return [t if rng.random() < 0.8 else 5 for t in plain[done : done + k]] or [5]

        session = engine.open(opening(PROMPT, sampling=sampling, seed=99))
        got = await speculate(engine, session, TokenSequence(PROMPT), len(plain) - 1, propose)
        assert got == plain[: len(got)]
        engine.close(session)
