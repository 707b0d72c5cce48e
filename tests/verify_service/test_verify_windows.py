"""Windows, distributions and log-probs through the engine and over gRPC."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from flyspec import wire
from flyspec.errors import InvalidArgumentError
from flyspec.rules import Rule, WindowScope
from flyspec.values.rounds import (
    DraftDistributions,
    OpenWindow,
    Outcome,
    Verdict,
    VerifyOpen,
    VerifyRound,
)
from flyspec.values.tokens import SamplingParams, TokenDistribution
from tests.verify_service.sessions import GREEDY, PROMPT, answers, open_message, opening

ANY = Rule("random", random_acceptance=1.0, fly_window_size=3)


def across():
    return replace(ANY, window_scope=WindowScope.ACROSS_ROUNDS)


@pytest.fixture(scope="module")
def log_softmax(loaded):
    """Raw log-probabilities after each of the last `count` tokens, float64 [count, V]."""

    def compute(tokens, count):
        with torch.inference_mode():
            logits = loaded.model(torch.tensor([tokens])).logits[0, -count:]
        return torch.log_softmax(logits.double(), -1)

    return compute


def target_token(log_softmax, tokens):
    return int(log_softmax(tokens, 1)[0].argmax())


def some_other(token):
    return 5 if token != 5 else 6


LOOSENED = Rule("random", random_acceptance=1.0, fly_window_size=0)
MIXED = Rule("ensemble", ensemble_weight=0.0)  # the draft's distribution alone


@pytest.mark.parametrize(("rule", "sampling"), [(LOOSENED, GREEDY), (MIXED, SamplingParams(1.0))])
@pytest.mark.parametrize("stop", ["neither", "draft", "own", "eos"])
async def test_a_stop_token_is_never_loose_nor_replaced(
    engine, log_softmax, loaded, rule, sampling, stop
):
    eos = next(iter(loaded.tokenizer.eos_token_ids))
    opened = opening(PROMPT, rule=rule, sampling=sampling)
    plain = engine.open(opened)
    (told,) = await answers(engine, plain, VerifyRound(1, len(PROMPT), [], []))
    own = told.next_token_id
    draft = eos if stop == "eos" else some_other(own)
    stops = {"draft": [draft], "own": [own]}.get(stop, [])
    session = engine.open(replace(opened, stop_token_ids=stops))
    halves = np.log([0.75, 0.25]).astype("<f2").tobytes()
    drawn = [TokenDistribution(halves, [draft, 9])] if rule is MIXED else []
    round_ = VerifyRound(1, len(PROMPT), [], [draft])
    (verdict,) = await answers(engine, session, round_, drawn)
    outcome = Outcome.LOOSE if stop == "neither" else Outcome.REJECTED
    assert [d.outcome for d in verdict.decisions] == [outcome]


async def test_a_window_open_at_a_stop_token_has_failed(engine, log_softmax):
    own = target_token(log_softmax, PROMPT)
    loose = some_other(own)
    stop = target_token(log_softmax, [*PROMPT, loose])
    for stops in ([], [stop]):
        open_ = replace(opening(PROMPT, rule=across()), stop_token_ids=stops)
        round_ = VerifyRound(1, len(PROMPT), [], [loose, stop])
        (verdict,) = await answers(engine, engine.open(open_), round_)
        outcomes = [d.outcome for d in verdict.decisions]
        assert (outcomes[0] is Outcome.REJECTED) == bool(stops), outcomes
        if stops:
            assert (verdict.keep_length, verdict.next_token_id) == (len(PROMPT), own)


async def test_plain_decoding_ends_at_a_stop_token(engine, greedy):
    tokens = greedy(PROMPT, 8)
    stop = next(t for i, t in enumerate(tokens) if i >= 2 and t not in tokens[:i])
    session = engine.open(replace(opening(PROMPT), stop_token_ids=[stop]))
    round_ = VerifyRound(1, len(PROMPT), [], [], max_plain_tokens=8)
    told = await answers(engine, session, round_)
    assert [each.next_token_id for each in told] == tokens[: tokens.index(stop) + 1]


@pytest.mark.parametrize(
    ("window", "message"),
    [
        (OpenWindow(len(PROMPT) - 1, 5, 1, 0.5), "position must be between"),
        (OpenWindow(len(PROMPT) + 2, 5, 1, 0.5), "position must be between"),
        (OpenWindow(len(PROMPT), 400, 1, 0.5), "target_token_id"),
        (OpenWindow(len(PROMPT), 5, 0, 0.5), "remaining_matches"),
        (OpenWindow(len(PROMPT), 5, 1, float("nan")), "gap_nats"),
    ],
)
async def test_bad_windows_are_refused_by_name(engine, window, message):
    session = engine.open(VerifyOpen([*PROMPT, 5, 6], len(PROMPT), across(), GREEDY, 0))
    with pytest.raises(InvalidArgumentError, match=message):
        await answers(engine, session, VerifyRound(1, len(PROMPT) + 2, [], [7], open_window=window))


async def test_a_window_without_drafts_fails_once(engine):
    """Plain decoding does not continue in the round, which would fail the window again."""
    session = engine.open(VerifyOpen([*PROMPT, 5, 6], len(PROMPT), across(), GREEDY, 0))
    window = OpenWindow(len(PROMPT), 7, 1, 0.5)
    round_ = VerifyRound(1, len(PROMPT) + 2, [], [], max_plain_tokens=8, open_window=window)
    (verdict,) = await answers(engine, session, round_)
    assert verdict.last
    assert (verdict.keep_length, verdict.next_token_id) == (len(PROMPT), 7)


def close_to(logprobs, row, token, top):
    """Check that one position's log-probs are those of a row of log_softmax."""
    assert logprobs.logprob == pytest.approx(float(row[token]), abs=1e-4)
    best = torch.topk(row, top)
    assert list(logprobs.top_token_ids) == best.indices.tolist()
    assert logprobs.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-4)


async def test_logprobs_of_every_token_that_stands(engine, log_softmax):
    open_ = VerifyOpen(PROMPT, len(PROMPT), across(), GREEDY, 0, logprobs=3)
    session = engine.open(open_)
    own = target_token(log_softmax, PROMPT)
    loose = some_other(own)
    drafts = [loose, target_token(log_softmax, [*PROMPT, loose])]
    (first,) = await answers(engine, session, VerifyRound(1, len(PROMPT), [], drafts))
    tokens = [*PROMPT, *drafts]
    rows = log_softmax(tokens, 3)
    for logprobs, row, token in zip(
        first.logprobs, rows, [*drafts, first.next_token_id], strict=True
    ):
        close_to(logprobs, row, token, 3)
    close_to(first.open_window.target_logprobs, rows[0], own, 3)

    tokens.append(first.next_token_id)
    wrong = some_other(target_token(log_softmax, tokens))
    (second,) = await answers(
        engine, session, VerifyRound(2, len(tokens), [], [wrong], open_window=first.open_window)
    )
    assert list(second.logprobs) == [first.open_window.target_logprobs]

    (plain,) = await answers(engine, session, VerifyRound(3, second.keep_length + 1, [], []))
    close_to(plain.logprobs[0], log_softmax([*PROMPT, own], 1)[0], plain.next_token_id, 3)
    with pytest.raises(InvalidArgumentError, match="target_logprobs"):
        await answers(
            engine,
            session,
            VerifyRound(4, plain.keep_length + 1, [], [5],
                        open_window=OpenWindow(len(PROMPT), 5, 1, 0.5)),
        )  # fmt: skip
    engine.close(session)
    with pytest.raises(InvalidArgumentError, match=r"open\.logprobs must be .* between 0 and 20"):
        engine.open(VerifyOpen(PROMPT, len(PROMPT), across(), GREEDY, 0, logprobs=21))
    with pytest.raises(InvalidArgumentError, match=r"open\.stop_token_ids: token id 400 is out"):
        engine.open(replace(opening(PROMPT), stop_token_ids=[3, 400]))


def round_message(drafts, round_id=1, keep=4):
    return wire.encode(VerifyRound(round_id, keep, [], drafts))


async def test_distributions_in_pieces_decide(service, log_softmax):
    """A draft with the target's distribution is accepted, one with a point mass elsewhere not."""
    prompt = [0, 17, 45, 120]
    logp = log_softmax(prompt, 1)[0]
    second = int(logp.topk(2).indices[1])
    same = TokenDistribution(logp.to(torch.float16).numpy().astype(np.dtype("<f2")).tobytes())
    changes = {"divergence_threshold": 0.05, "divergence_top_k": 0}
    for distribution, keep in ((same, 5), (TokenDistribution(), 4)):
        async with service() as stub:
            call = stub.Verify()
            await call.write(open_message(prompt, rule="fuzzy", **changes))
            for position in (4, 5):
                piece = DraftDistributions(1, position, [distribution])
                await call.write(wire.encode(piece))
            await call.write(round_message([second, 5]))
            verdict = wire.decode(Verdict, await call.read())
            assert verdict.keep_length >= keep
            assert (verdict.decisions[0].outcome is Outcome.LOOSE) == (keep == 5)
            call.cancel()
