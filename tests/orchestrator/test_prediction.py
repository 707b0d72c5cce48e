"""Predicted outputs: aligned with what is generated, drafted where it agrees, never in the way."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyspec.client import GenerateOptions
from flyspec.errors import InvalidArgumentError
from flyspec.rules import Rule
from flyspec.values.tokens import Origin
from orchestrator.generation.prediction import FIRST_RUN, Prediction

RNG = random.Random(0)
TEXT = [RNG.randrange(50, 400) for _ in range(500)]
for place in range(0, 500, 23):
    TEXT[place] = 7  # a name


def run(output, predicted, most=32):
    """Generate `output` in rounds; return their number, and the drafted and accepted tokens."""
    prediction, done = Prediction(predicted), []
    rounds = drafted = accepted = 0
    while len(done) < len(output):
        prediction.follow(done)
        proposal = prediction.propose(most)
        assert len(proposal) <= most
        rounds += 1
        rest = output[len(done) :]
        count = next((i for i, (a, b) in enumerate(zip(proposal, rest, strict=False)) if a != b),
                     min(len(proposal), len(rest)))  # fmt: skip
        if proposal:
            prediction.checked(len(proposal), count)
        drafted, accepted = drafted + len(proposal), accepted + count
        done = output[: len(done) + count + 1]
    return rounds, drafted, accepted


def edited(*segments):
    return [token for segment in segments for token in segment]


@pytest.mark.parametrize(
    ("output", "most_rounds"),
    [
        pytest.param(TEXT, 20, id="as predicted"),
        pytest.param([9 if t == 7 else t for t in TEXT], 21, id="a name changed throughout"),
        pytest.param(
            edited(*([9, 10, 11] if t == 7 else [t] for t in TEXT)), 25, id="to a longer name"
        ),
        pytest.param(TEXT[:200] + TEXT[260:], 23, id="a passage left out"),
        pytest.param([*TEXT[:200], 1, 2, 3, 4, 5, *TEXT[200:]], 30, id="a passage inserted"),
        pytest.param(TEXT[250:] + TEXT[:250], 55, id="passages moved"),
        pytest.param([t if i % 50 else 3 for i, t in enumerate(TEXT)], 45, id="words changed"),
    ],
)
def test_rounds_that_a_good_prediction_takes(output, most_rounds):
    rounds, drafted, accepted = run(output, TEXT)
    assert rounds <= most_rounds
    assert accepted > 0.7 * drafted


@pytest.mark.parametrize("seed", range(5))
def test_a_useless_prediction_is_hardly_ever_drafted(seed):
    rng = random.Random(seed)
    words = [1 / (rank + 1) for rank in range(60)]  # as frequent as in natural text
    output, predicted = (rng.choices(range(60), words, k=500) for _ in range(2))
    rounds, drafted, _ = run(output, predicted)
    assert drafted <= 80
    assert rounds > 450


tokens = st.lists(st.integers(0, 4), max_size=60)


@given(tokens, tokens, st.integers(1, 8))
def test_any_two_texts(output, predicted, most):
    rounds, _, accepted = run(output, predicted, most)
    assert rounds + accepted >= len(output)


@given(tokens, tokens, tokens, st.data())
def test_an_output_that_was_cut_and_went_on(output, predicted, more, data):
    prediction = Prediction(predicted)
    prediction.follow(output)
    length = data.draw(st.integers(0, len(output)))
    prediction.keep(length)
    output = [*output[:length], *more]
    prediction.follow(output)
    assert len(prediction.propose(8)) <= 8
    prediction.follow([*output, *predicted, *predicted])
    assert prediction.propose(8) == []  # it has reached its end


def test_it_waits_for_agreement():
    prediction = Prediction(TEXT)
    for count in range(FIRST_RUN):
        prediction.follow(TEXT[:count])
        assert not prediction.propose(8)
    prediction.follow(TEXT[:FIRST_RUN])
    assert prediction.propose(8) == TEXT[FIRST_RUN : FIRST_RUN + 8]


# --- in generations -------------------------------------------------------------------------------

PROMPT = "the cat"
PLAIN = GenerateOptions(max_tokens=100, num_speculative_tokens=0, ignore_eos=True)


@pytest.fixture(scope="session")
async def plain(stack):
    return await stack.client.complete(PROMPT, PLAIN)


@pytest.fixture
def predicted(plain):
    """The tokens themselves, with one passage changed. (As text they are not the same tokens.)"""
    return [*plain.token_ids[:40], 11, 12, *plain.token_ids[46:]]


@pytest.mark.parametrize(
    ("k", "drafter"), [(None, "model"), (4, "prompt_lookup"), (16, "model"), ("auto", "model")]
)
async def test_exact_texts_stay_the_same_and_take_fewer_rounds(stack, plain, predicted, k, drafter):
    options = GenerateOptions(
        max_tokens=100, rule=Rule("exact"), num_speculative_tokens=k, drafter=drafter,
        ignore_eos=True,
    )  # fmt: skip
    without = await stack.client.complete(PROMPT, options)
    helped = await stack.client.complete(PROMPT, replace(options, prediction=predicted))
    assert helped.token_ids == without.token_ids == plain.token_ids
    assert helped.origins.count(Origin.PREDICTED) > 40
    shares = {share.drafter: share for share in helped.completion.drafters}
    share = shares["prediction"]
    assert share.num_accepted_draft_tokens >= helped.origins.count(Origin.PREDICTED)
    most = 0.75 if k == 4 else 0.5
    assert helped.completion.speculation.num_rounds < most * max(
        without.completion.speculation.num_rounds, 40
    )
    assert await stack.idle()


@pytest.mark.parametrize("rule", ["fly", "fuzzy", "rejection"])
async def test_any_rule_applies_and_the_run_can_be_repeated(stack, predicted, rule):
    options = GenerateOptions(
        max_tokens=60, rule=Rule(rule), prediction=predicted, seed=3, ignore_eos=True,
        return_rounds=True,
    )  # fmt: skip
    first = await stack.client.complete(PROMPT, options)
    assert "prediction" in {record.drafter for record in first.rounds}
    rounds = first.completion.num_draft_tokens_per_round
    again = await stack.client.complete(
        PROMPT, replace(options, num_draft_tokens_per_round=rounds, num_speculative_tokens="auto")
    )
    assert again.token_ids == first.token_ids
    assert again.completion.num_draft_tokens_per_round == rounds


async def test_nothing_is_predicted_without_drafts(stack, predicted):
    with pytest.raises(InvalidArgumentError, match="not with speculation"):
        await stack.client.complete(PROMPT, replace(PLAIN, prediction=predicted))


async def test_text_is_encoded(stack, plain):
    tokenizer = stack.orchestrator.fleet.target.tokenizer
    text = tokenizer.decode(plain.token_ids[:40])
    options = GenerateOptions(max_tokens=20, num_speculative_tokens=4, ignore_eos=True)
    as_text, as_tokens = [
        await stack.client.complete(PROMPT, replace(options, prediction=prediction))
        for prediction in (text, tokenizer.encode(text, add_special_tokens=False))
    ]
    assert as_text.origins == as_tokens.origins


async def test_absurdly_long_predictions_are_refused(stack):
    with pytest.raises(InvalidArgumentError, match=r"prediction: .*; shorten it"):
        await stack.client.complete(PROMPT, replace(PLAIN, num_speculative_tokens=4,
                                                    prediction="x y " * 100_000))  # fmt: skip
