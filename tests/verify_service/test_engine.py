"""Rounds and plain decoding: the text of transformers, whatever is drafted and wherever it ends."""

import asyncio
import hashlib
import random
import threading

import pytest

from flyspec import wire
from flyspec.errors import InvalidArgumentError, PrefixMismatchError
from flyspec.prefix import TokenSequence
from flyspec.rules import Rule
from flyspec.values.rounds import Verdict, VerifyOpen, VerifyRound
from flyspec.values.tokens import SamplingParams
from tests.plain_tokens import one_by_one
from tests.scripted import ScriptedModel
from tests.verify_service.conftest import CACHES
from tests.verify_service.sessions import (
    EXACT,
    GREEDY,
    PROMPT,
    answers,
    engine_over,
    opening,
    speculate,
)


async def test_plain_decoding_streams_what_generate_gives(engine, greedy):
    session = engine.open(opening(PROMPT))
    verdicts = await answers(
        engine, session, VerifyRound(1, len(PROMPT), [], [], max_plain_tokens=40)
    )
    tokens = [v.next_token_id for v in verdicts]
    assert tokens == greedy(PROMPT, 40)
    assert [v.keep_length for v in verdicts] == [len(PROMPT) + i for i in range(len(tokens))]
    assert [v.last for v in verdicts] == [False] * (len(tokens) - 1) + [True]


@pytest.mark.parametrize(
    ("engine", "k", "quality"),
    [*zip(CACHES, (1, 4, 15), (0.8, 0.0, 0.9), strict=True)],
    indirect=["engine"],
)
async def test_drafts_of_any_quality_leave_the_text_alone(engine, greedy, k, quality):
    expected = greedy(PROMPT, 30)
    rng = random.Random(k)

    def propose(tokens):
        done = len(tokens) - len(PROMPT)
        right = expected[done : done + k]
        return [t if rng.random() < quality else rng.randrange(3, 400) for t in right] or [5], ()

    got, _ = await speculate(engine, opening(PROMPT), len(expected) - 1, propose)
    assert got == expected[: len(got)]


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

    def propose(tokens):
        done = len(tokens) - len(PROMPT)
        return [t if rng.random() < 0.8 else 5 for t in plain[done : done + 9]] or [5], ()

    open_ = opening(PROMPT, sampling=sampling, seed=99)
    got, _ = await speculate(engine, open_, len(plain) - 1, propose)
    assert got == plain[: len(got)]


# --- bursts of plain tokens, over scripted models ---------------------------------------------

EOS = 31
VOCAB = 32
START = [5, 6, 7]
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(1.0),
    SamplingParams(repetition_penalty=1.5),
    SamplingParams(min_tokens=9),
]


def endless(tokens):
    """Logits that depend on everything before, never favouring the end."""
    digest = hashlib.blake2b(bytes(tokens), digest_size=VOCAB).digest()
    return [byte / 32 - (99.0 if token == EOS else 0.0) for token, byte in enumerate(digest)]


def ending(tokens):
    """Likewise, but the end is sometimes likely."""
    digest = hashlib.blake2b(bytes(tokens), digest_size=VOCAB).digest()
    return [byte / 32 + (7.0 if token == EOS else 0.0) for token, byte in enumerate(digest)]


def started(sampling=SAMPLINGS[0], tokens=START, **options):
    return VerifyOpen(tokens, len(START), Rule("exact"), sampling, 11, **options)


async def told(engine, session, round_):
    inbox, found = engine.submit(session, round_), []
    while not found or not found[-1].last:
        found.append(await asyncio.wait_for(inbox.get(), 20))
        if isinstance(found[-1], Exception):
            raise found[-1]
    return found


def tokens_of(verdicts):
    return [v.next_token_id for v in one_by_one(verdicts)]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("script", [endless, ending])
async def test_a_burst_has_the_tokens_of_single_steps(sampling, script):
    async with engine_over(ScriptedModel(script)) as engine:
        session, expected = engine.open(started(sampling)), list(START)
        for number in range(40):
            (verdict,) = await told(engine, session, VerifyRound(number, len(expected), [], []))
            assert verdict.plain_token_ids == ()
            expected.append(verdict.next_token_id)
            if expected[-1] == EOS:
                break
        expected = expected[len(START) :]
        for most in (1, 2, 7, 40):
            one = engine.open(started(sampling))
            verdicts = await told(
                engine, one, VerifyRound(1, len(START), [], [], max_plain_tokens=most)
            )
            assert tokens_of(verdicts) == expected[:most]
            held = len(START)
            for verdict in one_by_one(verdicts):
                assert verdict.keep_length == held
                held += 1
            assert [v.last for v in verdicts] == [False] * (len(verdicts) - 1) + [True]
            assert one.sequence.tokens == [*START, *expected[:most]]
            # The cache is right behind it, wherever the next round builds on.
            keep = len(START) + len(expected[:most]) // 2
            sequence = TokenSequence([*START, *expected][:keep])
            again = VerifyRound(2, keep, [], [], sequence.hash, max_plain_tokens=3)
            assert tokens_of(await told(engine, one, again)) == expected[keep - len(START) :][:3]
            engine.close(one)
        engine.close(session)


async def test_only_where_nothing_else_is_wanted_are_there_several_a_verdict():
    async with engine_over(ScriptedModel(endless)) as engine:
        round_ = VerifyRound(1, len(START), [], [], max_plain_tokens=30)
        session = engine.open(started())
        verdicts = await told(engine, session, round_)
        # The first comes alone, since it waited for the prompt.
        assert verdicts[0].plain_token_ids == ()
        assert any(verdict.plain_token_ids for verdict in verdicts)
        for options in ({"logprobs": 2}, {"sampling": SamplingParams(1.0)}):
            session = engine.open(started(**options))
            verdicts = await told(engine, session, round_)
            assert len(verdicts) == 30
            assert len(verdicts[-1].logprobs) == ("logprobs" in options)


async def test_the_context_ends_it():
    model = ScriptedModel(endless, context_length=12)
    async with engine_over(model) as engine:
        session = engine.open(started())
        round_ = VerifyRound(1, len(START), [], [], max_plain_tokens=64)
        verdicts = await told(engine, session, round_)
        # The last token needs no place of its own.
        assert len(tokens_of(verdicts)) == 12 - len(START) + 1


def message(round_id, keep, append=(), drafts=(), plain=1, tokens=()):
    prefix = TokenSequence(tokens).hash if tokens else 0
    return wire.encode(VerifyRound(round_id, keep, append, drafts, prefix, plain))


async def read(call):
    return wire.decode(Verdict, await asyncio.wait_for(call.read(), 20))


async def test_over_a_stream_the_next_round_ends_it_and_its_end_does_not(service, greedy):
    prompt = [0, 17, 45, 120, 33]
    text = greedy(prompt, 64)
    opening_ = wire.encode(VerifyOpen(prompt, len(prompt), Rule("exact"), SamplingParams(), 1))
    async with service() as stub:
        call = stub.Verify()
        await call.write(opening_)
        await call.write(message(1, len(prompt), plain=64))
        first = await read(call)
        assert [first.next_token_id] == text[:1]
        # Keeps the first token alone, whatever has been decoded since.
        held = [*prompt, text[0]]
        await call.write(message(2, len(held), drafts=text[1:4], tokens=held))
        seen = [first]
        while seen[-1].round_id == 1:
            seen.append(await read(call))
        decoded = tokens_of(verdict for verdict in seen if verdict.round_id == 1)
        assert decoded == text[: len(decoded)]
        assert seen[-2].last
        assert (seen[-1].keep_length, seen[-1].next_token_id) == (len(held) + 3, text[4])
        # Another, and the client says that it sends no more: it gets all of it.
        await call.write(message(3, len(held) + 4, plain=30))
        await call.done_writing()
        rest = [await read(call)]
        while not rest[-1].last:
            rest.append(await read(call))
        got = tokens_of(rest)
        assert got == text[5 : 5 + len(got)]
        assert len(got) == 30 or got[-1] == 1


async def test_the_time_that_a_round_takes_is_not_the_clients_silence(service, engine, monkeypatch):
    gate, forward = threading.Event(), engine.model.forward

    def held_back(steps):
        assert gate.wait(20)
        return forward(steps)

    monkeypatch.setattr(engine.model, "forward", held_back)
    opening_ = wire.encode(started(tokens=START))
    async with service(idle_timeout_s=0.4) as stub:
        call = stub.Verify()
        await call.write(opening_)
        await call.write(message(1, len(START), drafts=[8, 9]))
        await asyncio.sleep(0.6)
        gate.set()
        verdict = await read(call)
        await call.write(message(2, verdict.keep_length + 1, drafts=[8, 9]))
        assert (await read(call)).round_id == 2
