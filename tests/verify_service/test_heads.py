"""Draft heads beside the target: the rows they read, what they hold, and faults."""

import asyncio
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flyspec import wire
from flyspec.errors import ConfigError, InvalidArgumentError, UnavailableError
from flyspec.rules import Rule, WindowScope
from flyspec.self_drafting import following_round
from flyspec.values.admin import TokenizerBundle
from flyspec.values.rounds import (
    Budget,
    HeadProposal,
    HeadRequest,
    OpenWindow,
    Outcome,
    Verdict,
    VerifyRound,
    VerifyTimings,
)
from flyspec.values.tokens import Drafted, SamplingParams
from tests.examples import examples
from tests.scripted import ScriptedModel
from tests.scripted_heads import ScriptedHead
from tests.verify_service.conftest import CACHES, JUDGE
from tests.verify_service.sessions import HELD, PROMPT, answers, drained, open_message, opening
from tests.waiting import until
from verify_service import warm_target
from verify_service.engine import VerifyEngine
from verify_service.heads import Heads
from verify_service.sessions import READ_AGAIN
from verify_service.warm_target import load_heads

LAYERS = (0, 1, -1)
HEAD = HeadRequest("head", 5)


def garbage(tokens):
    """A token that depends on all before it."""
    return 3 + (31 * sum(tokens) + len(tokens)) % 390


def with_head(engine, head, ends=(1,), context_length=None):
    info = engine.info
    length = context_length or info.context_length
    engine.heads = Heads({"head": head}, info.vocab_size, length, ends)
    return head


@pytest.fixture
def rows_of(loaded):
    """transformers' own hidden rows at each of some tokens."""

    def rows(tokens, layers):
        with torch.inference_mode():
            found = loaded.model(
                torch.tensor([list(tokens)]), use_cache=False, output_hidden_states=True
            )
        return [found.hidden_states[layer][0] for layer in layers]

    return rows


async def generate(engine, session, prompt, num_tokens, request=HEAD, first=1):
    """Decode with a head alone; return the tokens and how many drafts each round had."""
    tokens, drafts, counts = list(prompt), (), []
    for round_id in range(1, 1000):
        held = len(tokens) if round_id > 1 else len(prompt)
        round_ = VerifyRound(round_id, held, (), drafts, max_plain_tokens=first, head=request)
        for verdict in await answers(engine, session, round_):
            accepted = verdict.keep_length - len(tokens)
            tokens += [*drafts[:accepted], verdict.next_token_id]
        counts.append(len(drafts))
        if len(tokens) >= len(prompt) + num_tokens or tokens[-1] == 1:
            return tokens[len(prompt) :][:num_tokens], counts
        assert verdict.proposal is not None
        drafts = verdict.proposal.token_ids
        assert len(drafts) <= request.max_tokens
        assert len(verdict.proposal.confidences) == len(drafts)
    raise AssertionError


@pytest.mark.parametrize(
    ("engine", "guess"),
    [*zip(CACHES, ("right", "mostly", "garbage"), strict=True)],
    indirect=["engine"],
)
async def test_a_head_gets_the_targets_rows_and_leaves_the_text_alone(
    engine, greedy, rows_of, guess
):
    prompt = [0, *(random.Random(1).randrange(3, 400) for _ in range(70))]  # in pieces of 16
    text = [*prompt, *greedy(prompt, 40)]

    def guesses(tokens):
        right = text[len(tokens)] if len(tokens) < len(text) else 5
        wrong = guess == "garbage" or (guess == "mostly" and len(tokens) % 4 == 0)
        return garbage(tokens) if wrong else right

    head = with_head(engine, ScriptedHead(guesses, 5, LAYERS, rows_of))
    session = engine.open(opening(prompt))
    got, counts = await generate(engine, session, prompt, 30)
    assert got == text[len(prompt) :][: len(got)]
    assert counts[0] == 0
    assert set(counts[1:]) == {5}
    if guess == "right":
        assert len(counts) <= 7
    assert [step.start for step in head.steps[:4]] == [0, 16, 32, 48]
    assert [step.max_tokens for step in head.steps[:4]] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "sampling", [SamplingParams(0.8), SamplingParams(1.0, 0.9, repetition_penalty=1.3)]
)
async def test_sampled_text_does_not_depend_on_a_head(engine, sampling):
    def open_():
        return engine.open(opening(PROMPT, sampling=sampling, seed=9))

    session = open_()
    verdicts = await answers(
        engine, session, VerifyRound(1, len(PROMPT), [], [], max_plain_tokens=30)
    )
    plain = [verdict.next_token_id for verdict in verdicts]
    engine.close(session)
    for k in (1, 8):
        head = with_head(engine, ScriptedHead(garbage, 8))
        session = open_()
        got, _ = await generate(engine, session, PROMPT, 30, HeadRequest("head", k))
        assert got == plain[: len(got)]
        drafting = [step for step in head.steps if step.max_tokens]
        assert {step.sampling for step in drafting} == {sampling}
        assert {step.seed for step in drafting} == {9}
        for step in drafting:
            assert (step.history is not None) == sampling.needs_history
        engine.close(session)


async def test_plain_decoding_ends_with_a_proposal(engine, greedy, rows_of):
    head = with_head(engine, ScriptedHead(garbage, 5, LAYERS, rows_of))
    session = engine.open(opening(PROMPT))
    round_ = VerifyRound(1, len(PROMPT), (), (), max_plain_tokens=4, head=HEAD)
    verdicts = await answers(engine, session, round_)
    assert [v.next_token_id for v in verdicts] == greedy(PROMPT, 4)
    assert [v.proposal is not None for v in verdicts] == [False, False, False, True]
    assert [len(step.token_ids) for step in head.steps] == [len(PROMPT), 1, 1, 1]
    assert verdicts[-1].timings.head_ns > 0
    only_read = HeadRequest("head", 0)
    round_ = VerifyRound(2, len(PROMPT) + 4, (), (9,), head=only_read)
    (verdict,) = await answers(engine, session, round_)
    assert verdict.proposal is None
    assert head.held(session.slot) == verdict.keep_length


@pytest.mark.parametrize("ignored", [False, True])
async def test_nothing_is_drafted_behind_an_accepted_end(engine, greedy, rows_of, ignored):
    first, second, third = greedy(PROMPT, 3)
    head = with_head(engine, ScriptedHead(garbage, 5, LAYERS, rows_of), [second])
    session = engine.open(opening(PROMPT))
    (verdict,) = await answers(
        engine,
        session,
        VerifyRound(1, len(PROMPT), (), (first, second), head=HEAD._replace(ignore_eos=ignored)),
    )
    assert (verdict.num_accepted, verdict.next_token_id) == (2, third)
    assert (verdict.proposal is not None) == ignored
    assert [step.max_tokens for step in head.steps] == [5 if ignored else 0]


async def test_what_a_head_misses_is_read_again_as_far_as_it_is_near(engine, greedy, rows_of):
    head = with_head(engine, ScriptedHead(garbage, 5, LAYERS, rows_of))
    prompt = [0, *(random.Random(2).randrange(3, 400) for _ in range(99))]
    session = engine.open(opening(prompt))
    await answers(engine, session, VerifyRound(1, len(prompt), (), (), max_plain_tokens=3))
    assert head.steps == []
    length = len(prompt) + 3
    (verdict,) = await answers(engine, session, VerifyRound(2, length, (), (7,), head=HEAD))
    assert verdict.proposal is not None
    # The target holds all but the last token.
    begins = [step.start for step in head.steps]
    assert begins[0] == length - 1 - READ_AGAIN
    assert sum(len(step.token_ids) for step in head.steps) == verdict.keep_length - begins[0]
    head.steps.clear()
    length = verdict.keep_length + 1
    for round_id in (3, 4, 5):  # without the head: it falls behind
        (verdict,) = await answers(engine, session, VerifyRound(round_id, length, (), ()))
        length = verdict.keep_length + 1
    (verdict,) = await answers(engine, session, VerifyRound(6, length, (), (), head=HEAD))
    assert [(step.start, len(step.token_ids)) for step in head.steps] == [(length - 4, 4)]


async def test_a_failed_window_costs_one_proposal(engine, rows_of):
    head = with_head(engine, ScriptedHead(garbage, 5, LAYERS, rows_of))
    rule = Rule("margin", window_scope=WindowScope.ACROSS_ROUNDS)
    session = engine.open(opening(PROMPT, rule))
    (verdict,) = await answers(
        engine, session, VerifyRound(1, len(PROMPT), (), (9, 10, 11), head=HEAD)
    )
    length = len(session.sequence)
    position = length - 1
    window = OpenWindow(position, 77, 3, 0.1)
    wrong = (4 if verdict.proposal.token_ids[0] != 4 else 5,)
    (verdict,) = await answers(
        engine, session, VerifyRound(2, length, (20, 21), wrong, open_window=window, head=HEAD)
    )
    assert verdict.failed
    assert verdict.keep_length == position
    # The row before the replaced token is in no step of this round.
    assert verdict.proposal is None
    head.steps.clear()
    (verdict,) = await answers(engine, session, VerifyRound(3, position + 1, (), (), head=HEAD))
    assert verdict.proposal is not None
    assert [(step.start, len(step.token_ids)) for step in head.steps] == [(position - 1, 2)]


async def test_judging_by_hidden_rows_goes_with_a_head(engine):
    """The judge of `autojudge` gets the rows that it gets without."""
    rule, rng = Rule("autojudge", judge_threshold=0.5), random.Random(5)
    drafts = [[rng.randrange(3, 400) for _ in range(6)] for _ in range(4)]

    async def verdicts(head):
        session, found, length = engine.open(opening(PROMPT, rule)), [], len(PROMPT)
        for round_id, each in enumerate(drafts, 1):
            round_ = VerifyRound(round_id, length, (), each, head=head)
            (verdict,) = await answers(engine, session, round_)
            length = verdict.keep_length + 1
            found.append((verdict.keep_length, verdict.next_token_id, verdict.decisions))
        engine.close(session)
        return found

    with_head(engine, ScriptedHead(garbage, 5, (1, -1)))
    assert JUDGE.hidden_size
    assert await verdicts(HEAD) == await verdicts(None)


async def test_a_head_drafts_for_all_rounds_of_a_step_at_once(engine, greedy):
    head = with_head(engine, ScriptedHead(garbage, 4))
    prompts = [[0, *range(10 * i + 5, 10 * i + 9 + i)] for i in range(4)]

    async def one(prompt):
        session = engine.open(opening(prompt))
        got, _ = await generate(engine, session, prompt, 25)
        engine.close(session)
        return got

    for prompt, got in zip(prompts, await asyncio.gather(*map(one, prompts)), strict=True):
        assert got == greedy(prompt, 25)[: len(got)]
    assert max(head.batches) > 1


@pytest.mark.parametrize("fault", ["raises", "vocabulary", "chances", "too many"])
async def test_a_head_that_fails_harms_no_verdict(engine, greedy, fault):
    class Faulty(ScriptedHead):
        def _continue(self, step, tokens):
            drafted = super()._continue(step, tokens)
            if tokens[1] != 17 or not step.max_tokens:
                return drafted
            match fault:
                case "raises":
                    raise FloatingPointError("NaN")
                case "vocabulary":
                    return drafted._replace(token_ids=[400] * step.max_tokens)
                case "chances":
                    return drafted._replace(confidences=[float("nan")] * step.max_tokens)
            return Drafted([5] * 9, (), (), [0.5] * 9)

    head = with_head(engine, Faulty(garbage, 4))
    sick, well = PROMPT, [0, 18, *PROMPT[2:]]
    one, other = engine.open(opening(sick)), engine.open(opening(well))

    async def round_(session, prompt, round_id, keep):
        asked = VerifyRound(round_id, keep, (), (9,), head=HEAD)
        (verdict,) = await answers(engine, session, asked)
        return verdict

    found, good = await asyncio.gather(round_(one, sick, 1, 8), round_(other, well, 1, 8))
    assert found.next_token_id in greedy(sick, 2)
    assert found.proposal is None
    assert good.proposal is not None
    assert engine.heads.failures["head"] == 1
    # Its session goes on without the head, and does not pay for it.
    steps = len(head.steps)
    again = await round_(one, sick, 2, found.keep_length + 1)
    assert again.proposal is None
    assert len(head.steps) == steps
    assert engine.heads.failures["head"] == 1
    engine.close(one)
    engine.close(other)
    assert engine.failures.num_total == 0


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (HeadRequest("other", 3), "no head 'other'; choose from head, or start"),
        (HeadRequest("head", 3, float("nan")), "min_confidence must be between 0 and 1, got nan"),
        (HeadRequest("head", 3, 1.5), "min_confidence must be between 0 and 1, got 1.5"),
    ],
)
async def test_bad_requests_are_refused_by_name(engine, request_, message):
    with_head(engine, ScriptedHead(garbage))
    session = engine.open(opening(PROMPT))
    with pytest.raises(InvalidArgumentError, match=rf"round\.head\..*{message}"):
        await answers(engine, session, VerifyRound(1, len(PROMPT), (), (), head=request_))


def test_heads_are_loaded_and_tried_beside_their_target(engine, loaded, monkeypatch):
    given = []

    def load_head(directory, target, num_slots, flash_attn):
        given.append((str(directory), target, num_slots))
        layers = (9,) if directory.name == "deep" else LAYERS
        return ScriptedHead(garbage, 3, layers)

    monkeypatch.setattr(warm_target, "load_head", load_head, raising=False)
    heads = load_heads("a=/heads/a b=/heads/b", loaded, engine.model)
    assert [info.name for info in heads.infos] == ["a", "b"]
    assert given == [("/heads/a", loaded, 4), ("/heads/b", loaded, 4)]
    assert engine.model.cache.num_free == 4
    with pytest.raises(ConfigError, match=r"--heads a=/deep: it does not work .* hidden_layers: 9"):
        load_heads("a=/deep", loaded, engine.model)
    for wrong, why in {
        "a": "'a' is not NAME=PATH; give one for each head, separated by spaces",
        "a=x a=y": "'a' is given twice",
        "relay=x": "'relay' is another drafter",
        "a/b=x": "invalid name 'a/b'",
    }.items():
        with pytest.raises(ConfigError, match=f"--heads: {why}"):
            load_heads(wrong, loaded, engine.model)


# --- any sequence of rounds -----------------------------------------------------------------

TOKENIZER = TokenizerBundle(b"", "", (), ())
ROUNDS = st.lists(
    st.tuples(
        st.integers(0, 1),  # session
        st.integers(0, 12),  # tokens to take back
        st.lists(st.integers(1, 31), max_size=3),  # to append
        st.integers(0, 4),  # right drafts
        st.integers(0, 2),  # wrong ones
        st.integers(1, 3),  # plain tokens
        st.sampled_from(["", "one", "other"]),
        st.booleans(),  # reopen first
    ),
    min_size=1,
    max_size=25,
)


def rows(tokens, layers):
    """Those of `ScriptedModel`."""
    return [torch.tensor([[token, layer] for token in tokens]) for layer in layers]


@settings(max_examples=examples(12))
@given(ROUNDS)
def test_heads_follow_any_rollback(plan):
    """Every row that a head reads is of the sequence, and every proposal follows the sequence."""

    async def run():
        model = ScriptedModel(num_slots=2, context_length=200)
        engine = VerifyEngine(model, TOKENIZER, 64)
        heads = {
            name: ScriptedHead(lambda tokens: sum(tokens) % 32, 3, (i, -1), rows)
            for i, name in enumerate(("one", "other"))
        }
        engine.heads = Heads(heads, 32, 200)
        engine.start()
        open_tokens = [[0, 1, 2, 3, 4], [0, 5, 6, 7]]
        sessions = [engine.open(opening(tokens)) for tokens in open_tokens]
        sequences = [list(tokens) for tokens in open_tokens]
        try:
            for round_id, (which, back, append, right, wrong, plain, name, reopen) in enumerate(
                plan, 1
            ):
                tokens = sequences[which]
                if reopen or len(tokens) > 150:
                    engine.close(sessions[which])
                    tokens = sequences[which] = tokens[:40]
                    sessions[which] = engine.open(opening(tokens))
                keep = max(1, len(tokens) - back)
                tokens[keep:] = append
                drafts = [(tokens[-1] + 1 + i) % 32 for i in range(right)] + [
                    31 - tokens[-1]
                ] * wrong
                request = HeadRequest(name, 3) if name else None
                round_ = VerifyRound(
                    round_id, keep, append, drafts, max_plain_tokens=plain, head=request
                )
                before = list(tokens)
                for verdict in await answers(engine, sessions[which], round_):
                    accepted = verdict.keep_length - len(before)
                    tokens[len(before) :] = [*drafts[: max(0, accepted)], verdict.next_token_id]
                    before = list(tokens)
                    drafts = []
                check(verdict, name, heads, sessions[which].slot, tokens)
        finally:
            engine.stop()

    def check(verdict, name, heads, slot, tokens):
        assert (verdict.proposal is not None) == bool(name)
        if not name:
            return
        head = heads[name]
        assert head.held(slot) == len(tokens) - 1
        held = head._tokens[slot]
        # What it holds is the sequence, but for what it missed.
        for mine, own in zip(held[1:], tokens[1:], strict=True):
            assert mine in (None, own)
        if None not in held[1:]:
            drafts = list(verdict.proposal.token_ids)
            assert drafts[0] == sum(tokens) % 32

    asyncio.run(run())


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

    return with_head(engine, ScriptedHead(guess, 4))


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
    ("rule", "temperature"), [*zip(RULES, (1.0, 0.0, 1.0, 0.0, 1.0), strict=True)]
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
    with_head(engine, head, [end])
    session = engine.open(opening(PROMPT))
    verdicts = await hear(engine, session, VerifyRound(1, len(PROMPT), (), (), head=asking(99)))
    assert end in list(session.sequence.tokens)[-2:]
    assert verdicts[-1].proposal is None


async def test_the_end_of_the_context_ends_them(engine, head, greedy):
    room = 20
    with_head(engine, head, (), len(PROMPT) + room)
    session = engine.open(opening(PROMPT))
    await hear(engine, session, VerifyRound(1, len(PROMPT), (), (), head=asking(99)))
    assert len(PROMPT) + room - 1 <= len(session.sequence) <= len(PROMPT) + room + 1


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


async def test_a_head_that_fails_leaves_a_plain_round(engine, head, greedy):
    head.fails = lambda step: step.max_tokens and step.start > len(PROMPT) + 8
    session = engine.open(opening(PROMPT))
    verdicts = await hear(engine, session, VerifyRound(1, len(PROMPT), (), (), head=asking(99)))
    assert verdicts[-1].drafts == HeadProposal()
    assert (verdicts[-1].decisions, verdicts[-1].proposal) == ((), None)
    tokens = list(session.sequence.tokens)
    assert tokens == [*PROMPT, *greedy(PROMPT, len(tokens) - len(PROMPT))]
    assert engine.heads.failures["head"] == 1


async def test_a_head_that_fails_in_an_open_window_loses_the_session(engine, head):
    rule = Rule("margin", margin_threshold=50.0, window_scope=ACROSS, fly_window_size=9)
    head.guess = lambda tokens: 9
    session = engine.open(opening(PROMPT, rule))
    head.fails = lambda step: step.max_tokens > 0
    start = VerifyRound(1, len(PROMPT), (), (7,), head=asking(9))
    with pytest.raises(UnavailableError, match="open window needs drafts"):
        await hear(engine, session, start)


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
