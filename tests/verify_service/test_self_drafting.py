"""Rounds that a head goes on with: the same as if each were sent, until something ends them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from flyspec import wire
from flyspec.errors import UnavailableError
from flyspec.rules import Rule, WindowScope
from flyspec.self_drafting import following_round
from flyspec.values.rounds import (
    Budget,
    HeadProposal,
    HeadRequest,
    Outcome,
    Verdict,
    VerifyRound,
    VerifyTimings,
)
from flyspec.values.tokens import SamplingParams
from tests.scripted_heads import ScriptedHead
from tests.verify_service.sessions import HELD, PROMPT, drained, open_message, opening
from tests.waiting import until
from verify_service.heads import Heads

ACROSS = WindowScope.ACROSS_ROUNDS
RULES = [
    Rule("exact"), Rule("fly", fly_window_size=2), Rule("margin", margin_threshold=2.0),
    Rule("margin", margin_threshold=2.0, window_scope=ACROSS, fly_window_size=3), Rule("rejection"),
]  # fmt: skip


@pytest.fixture
def head(engine, greedy):
    """A head that guesses the target's own token most of the time."""

    def guess(tokens):
        (own,) = greedy(tokens, 1)
        return own if sum(tokens) % 5 else (own + 1) % 400

    found = ScriptedHead(guess, 4)
    engine.heads = Heads({"head": found}, engine.info.vocab_size, engine.info.context_length, [1])
    return found


def asking(num_rounds, max_tokens=4):
    return HeadRequest("head", max_tokens, num_rounds=num_rounds)


async def hear(engine, session, round_, interrupt_at=None):
    """Send one round; return the verdicts on it and on all that the head goes on with."""
    inbox, found = engine.submit(session, round_), []
    while True:
        answer = await asyncio.wait_for(inbox.get(), 60)
        if isinstance(answer, Exception):
            raise answer
        found.append(answer)
        if len(found) == interrupt_at:
            engine.interrupt(session)
        if answer.last and not answer.started_staged_round_id:
            return found


def outcome(verdict):
    """A verdict without ids, times and what comes with it."""
    bare = replace(verdict, round_id=0, timings=VerifyTimings(), proposal=None, drafts=None)
    return replace(bare, started_staged_round_id=0)


@pytest.mark.parametrize(
    ("rule", "temperature"), zip(RULES, (1.0, 0.0, 1.0, 0.0, 1.0), strict=True)
)
async def test_the_same_rounds_as_if_each_were_sent(engine, head, rule, temperature):
    budget = Budget(6, 40.0)
    start = VerifyRound(1, len(PROMPT), (), (), budget=budget, head=asking(6))
    sampling = SamplingParams(temperature)
    session = engine.open(opening(PROMPT, rule, sampling, 3))
    together = await hear(engine, session, start)
    engine.close(session)
    session = engine.open(opening(PROMPT, rule, sampling, 3))
    round_, apart, drafts = replace(start, head=asking(0)), [], []
    while len(apart) < len(together):
        sent = round_ if not drafts else replace(round_, draft_token_ids=drafts[-1].token_ids)
        inbox = engine.submit(session, sent, drafts[-1].distributions if drafts else ())
        verdict = await asyncio.wait_for(inbox.get(), 60)
        assert isinstance(verdict, Verdict), verdict
        apart.append(verdict)
        if verdict.proposal is None:
            break
        drafts.append(verdict.proposal)
        round_ = replace(following_round(round_, verdict), head=asking(0))
    engine.close(session)
    assert list(map(outcome, together)) == list(map(outcome, apart))
    assert [v.drafts for v in together] == [None, *drafts][: len(together)]
    assert [v.round_id for v in together] == list(range(1, len(together) + 1))
    begun = [v.started_staged_round_id for v in together]
    assert begun == [*range(2, len(together) + 1), 0]
    assert [v.proposal is not None for v in together[:-1]] == [False] * (len(together) - 1)
    if not any(v.failed for v in apart):
        assert len(together) == 7
        assert together[-1].proposal == apart[-1].proposal
    for verdict in together:
        times = verdict.timings
        assert min(times.queue_ns, times.forward_ns, times.judge_ns, times.head_ns) >= 0
        assert times.service_ns >= times.forward_ns
        assert (times.head_ns > 0) == (verdict.drafts is not None)


async def test_an_end_of_sequence_ends_them(engine, head, greedy):
    text = greedy(PROMPT, 40)
    end = next(token for i, token in enumerate(text) if i > 12 and token not in text[:i])
    info = engine.info
    engine.heads = Heads({"head": head}, info.vocab_size, info.context_length, [end])
    session = engine.open(opening(PROMPT))
    verdicts = await hear(engine, session, VerifyRound(1, len(PROMPT), (), (), head=asking(99)))
    assert end in list(session.sequence.tokens)[-2:]
    assert verdicts[-1].proposal is None
    engine.close(session)


async def test_the_end_of_the_context_ends_them(engine, head, greedy):
    room = 20
    info = engine.info
    engine.heads = Heads({"head": head}, info.vocab_size, len(PROMPT) + room, [])
    session = engine.open(opening(PROMPT))
    await hear(engine, session, VerifyRound(1, len(PROMPT), (), (), head=asking(99)))
    assert len(PROMPT) + room - 1 <= len(session.sequence) <= len(PROMPT) + room + 1
    engine.close(session)


async def test_the_next_round_ends_them_and_goes_its_own_way(engine, head, greedy):
    session = engine.open(opening(PROMPT))
    start = VerifyRound(1, len(PROMPT), (), (), head=asking(99))
    verdicts = await hear(engine, session, start, interrupt_at=3)
    assert 3 <= len(verdicts) < 99
    held = len(PROMPT) + 2
    (verdict,) = await hear(engine, session, VerifyRound(200, held, (7,), (9, 9), head=asking(0)))
    prefix = [*PROMPT, *greedy(PROMPT, 2), 7]
    assert verdict.next_token_id == greedy(prefix, 1)[0]
    assert (verdict.start_length, verdict.decisions[0].outcome) == (held + 1, Outcome.REJECTED)
    engine.close(session)


async def test_a_head_that_fails_leaves_a_plain_round(engine, head, greedy):
    head.fails = lambda step: step.max_tokens and step.start > len(PROMPT) + 8
    session = engine.open(opening(PROMPT))
    verdicts = await hear(engine, session, VerifyRound(1, len(PROMPT), (), (), head=asking(99)))
    assert verdicts[-1].drafts == HeadProposal()
    assert (verdicts[-1].decisions, verdicts[-1].proposal) == ((), None)
    tokens = list(session.sequence.tokens)
    assert tokens == [*PROMPT, *greedy(PROMPT, len(tokens) - len(PROMPT))]
    assert engine.heads.failures["head"] == 1
    engine.close(session)


async def test_a_head_that_fails_in_an_open_window_loses_the_session(engine, head):
    rule = Rule("margin", margin_threshold=50.0, window_scope=ACROSS, fly_window_size=9)
    head.guess = lambda tokens: 9
    session = engine.open(opening(PROMPT, rule))
    head.fails = lambda step: step.max_tokens > 0
    start = VerifyRound(1, len(PROMPT), (), (7,), head=asking(9))
    with pytest.raises(UnavailableError, match="open window needs drafts"):
        await hear(engine, session, start)
    engine.close(session)


async def test_one_message_many_answers(service, engine, head, greedy):
    text = greedy(PROMPT, 60)
    async with service() as stub:
        stream = stub.Verify()
        await stream.write(open_message(PROMPT))
        await stream.write(wire.encode(VerifyRound(5, len(PROMPT), (), (), head=asking(6))))
        tokens = []
        for round_id in range(5, 12):
            length = len(PROMPT) + len(tokens)
            verdict = wire.decode(Verdict, await stream.read(), start_length=length)
            assert verdict.round_id == round_id
            assert verdict.started_staged_round_id == (round_id + 1 if round_id < 11 else 0)
            drafts = verdict.drafts.token_ids if verdict.drafts else ()
            tokens += [*drafts[: verdict.num_accepted], verdict.next_token_id]
        assert tokens == text[: len(tokens)]
        # The stream goes on behind them, from wherever the sender likes.
        await stream.write(wire.encode(VerifyRound(20, HELD, (), (3,), head=asking(0))))
        verdict = wire.decode(Verdict, await stream.read(), start_length=HELD)
        assert (verdict.round_id, verdict.next_token_id) == (20, greedy(PROMPT[:HELD], 1)[0])
        stream.cancel()
    assert await drained(engine)


async def test_closing_the_session_ends_them(engine, head):
    session = engine.open(opening(PROMPT))
    engine.submit(session, VerifyRound(1, len(PROMPT), (), (), head=asking(10_000)))
    await asyncio.sleep(0.05)
    engine.close(session)
    assert await until(lambda: engine.waiting == 0)
