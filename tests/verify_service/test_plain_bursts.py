"""Rounds and plain decoding over scripted models; bursts end where the next round arrives."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Sequence

import pytest

from flyspec import wire
from flyspec.engine.model import Draw, Step
from flyspec.prefix import TokenSequence
from flyspec.rules import Rule
from flyspec.values.rounds import Verdict, VerifyOpen, VerifyRound
from flyspec.values.tokens import SamplingParams
from tests.plain_tokens import one_by_one
from tests.scripted import ScriptedModel
from tests.verify_service.sessions import answers, engine_over, tokenizer_of
from tests.waiting import until
from verify_service.engine import VerifyEngine

EOS = 31
VOCAB = 32
PROMPT = [5, 6, 7]
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(1.0),
    SamplingParams(repetition_penalty=1.5),
    SamplingParams(min_tokens=9),
]


def endless(tokens: Sequence[int]) -> list[float]:
    """Logits that depend on everything before, never favouring the end."""
    digest = hashlib.blake2b(bytes(tokens), digest_size=VOCAB).digest()
    return [byte / 32 - (99.0 if token == EOS else 0.0) for token, byte in enumerate(digest)]


def ending(tokens: Sequence[int]) -> list[float]:
    """Likewise, but the end is sometimes likely."""
    digest = hashlib.blake2b(bytes(tokens), digest_size=VOCAB).digest()
    return [byte / 32 + (7.0 if token == EOS else 0.0) for token, byte in enumerate(digest)]


class Gated(ScriptedModel):
    """Runs one step for each permit, once it has a gate."""

    def __init__(self, script=endless):
        super().__init__(script)
        self.gate: threading.Semaphore | None = None

    def forward(self, steps: Sequence[Step]):
        if self.gate is not None:
            assert self.gate.acquire(timeout=20)
        return super().forward(steps)


def opening(sampling=SAMPLINGS[0], tokens=PROMPT, **options):
    return VerifyOpen(tokens, len(PROMPT), Rule("exact"), sampling, 11, **options)


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
        session, expected = engine.open(opening(sampling)), list(PROMPT)
        for number in range(40):
            (verdict,) = await told(engine, session, VerifyRound(number, len(expected), [], []))
            assert verdict.plain_token_ids == ()
            expected.append(verdict.next_token_id)
            if expected[-1] == EOS:
                break
        expected = expected[len(PROMPT) :]
        for most in (1, 2, 7, 40):
            one = engine.open(opening(sampling))
            verdicts = await told(
                engine, one, VerifyRound(1, len(PROMPT), [], [], max_plain_tokens=most)
            )
            assert tokens_of(verdicts) == expected[:most]
            held = len(PROMPT)
            for verdict in one_by_one(verdicts):
                assert verdict.keep_length == held
                held += 1
            assert [v.last for v in verdicts] == [False] * (len(verdicts) - 1) + [True]
            assert one.sequence.tokens == [*PROMPT, *expected[:most]]
            # The cache is right behind it, wherever the next round builds on.
            keep = len(PROMPT) + len(expected[:most]) // 2
            sequence = TokenSequence([*PROMPT, *expected][:keep])
            again = VerifyRound(2, keep, [], [], sequence.hash, max_plain_tokens=3)
            assert tokens_of(await told(engine, one, again)) == expected[keep - len(PROMPT) :][:3]
            engine.close(one)
        engine.close(session)


async def test_only_where_nothing_else_is_wanted_are_there_several_a_verdict():
    async with engine_over(ScriptedModel(endless)) as engine:
        round_ = VerifyRound(1, len(PROMPT), [], [], max_plain_tokens=30)
        session = engine.open(opening())
        verdicts = await told(engine, session, round_)
        # The first comes alone, since it waited for the prompt.
        assert verdicts[0].plain_token_ids == ()
        assert any(verdict.plain_token_ids for verdict in verdicts)
        for options in ({"logprobs": 2}, {"sampling": SamplingParams(1.0)}):
            session = engine.open(opening(**options))
            verdicts = await told(engine, session, round_)
            assert len(verdicts) == 30
            assert len(verdicts[-1].logprobs) == ("logprobs" in options)


async def test_the_context_ends_it():
    model = ScriptedModel(endless, context_length=12)
    async with engine_over(model) as engine:
        session = engine.open(opening())
        round_ = VerifyRound(1, len(PROMPT), [], [], max_plain_tokens=64)
        verdicts = await told(engine, session, round_)
        # The last token needs no place of its own.
        assert len(tokens_of(verdicts)) == 12 - len(PROMPT) + 1


@pytest.mark.parametrize("sampling", SAMPLINGS[:2])
async def test_the_next_round_ends_it_with_the_token_at_hand(sampling):
    model = Gated()
    async with engine_over(model) as engine:
        plain = engine.open(opening(sampling))
        free = await told(engine, plain, VerifyRound(1, len(PROMPT), [], [], max_plain_tokens=30))
        text = tokens_of(free)
        before, model.gate = len(model.calls), threading.Semaphore(0)
        session = engine.open(opening(sampling))
        inbox = engine.submit(session, VerifyRound(1, len(PROMPT), [], [], max_plain_tokens=30))
        model.gate.release(4)
        await until(lambda: len(model.calls) >= before + 4)
        engine.interrupt(session)
        model.gate.release(1000)
        verdicts = []
        while not verdicts or not verdicts[-1].last:
            verdicts.append(await asyncio.wait_for(inbox.get(), 20))
        got = tokens_of(verdicts)
        assert got == text[: len(got)]
        assert len(got) < 30
        # The next one keeps fewer than were decoded, and goes on as if there had been no others.
        keep = len(PROMPT) + 2
        round_ = VerifyRound(2, keep, [], [*text[2:5], 9], max_plain_tokens=1)
        (verdict,) = await told(engine, session, round_)
        accepted = 4 if text[5] == 9 else 3
        assert verdict.keep_length == keep + accepted
        assert verdict.next_token_id == text[2 + accepted]


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
    opening_ = wire.encode(opening(tokens=PROMPT))
    async with service(idle_timeout_s=0.4) as stub:
        call = stub.Verify()
        await call.write(opening_)
        await call.write(message(1, len(PROMPT), drafts=[8, 9]))
        await asyncio.sleep(0.6)
        gate.set()
        verdict = await read(call)
        await call.write(message(2, verdict.keep_length + 1, drafts=[8, 9]))
        assert (await read(call)).round_id == 2


async def test_rounds_and_plain_decoding() -> None:
    model = ScriptedModel()
    async with engine_over(model) as engine:
        open_ = VerifyOpen([5, 6, 7], 3, Rule("exact"), SamplingParams(), 0)
        session = engine.open(open_)
        (verdict,) = await answers(engine, session, VerifyRound(1, 3, [], [8, 9, 4, 5]))
        assert (verdict.keep_length, verdict.next_token_id) == (5, 10)
        (verdict,) = await answers(engine, session, VerifyRound(2, 6, [], [11, 12]))
        assert (verdict.keep_length, verdict.next_token_id) == (8, 13)
        # What the verdict let stand is not run again.
        assert model.calls[-1] == [Step(0, 5, [10, 11, 12], 3)]
        plain = await answers(engine, session, VerifyRound(3, 6, [28], [], max_plain_tokens=9))
        assert [v.next_token_id for v in plain] == [29, 30, EOS]
        assert [v.last for v in plain] == [False, False, True]
        engine.close(session)
    assert model.cache.num_free == model.cache.num_slots


async def test_hidden_rows_come_back_as_each_asks_for_them() -> None:
    engine = VerifyEngine(ScriptedModel(), tokenizer_of(EOS), max_queue=8)
    wants = [
        Draw(Step(0, 0, [4, 5], 2, (3, 1))),
        Draw(Step(1, 0, [6])),
        Draw(Step(2, 0, [7], 1, (2,))),
    ]
    rows = engine.run_batch(wants)
    assert [[h.tolist() for h in r.hidden] for r in rows] == [
        [[[4, 3], [5, 3]], [[4, 1], [5, 1]]],
        [],
        [[[7, 2]]],
    ]
