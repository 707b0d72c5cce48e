"""Heads in a whole stack: real services, a tiny target in float64, a head that reads its rows."""

from __future__ import annotations

import functools

import pytest
import torch

from flyspec.client import Chunk, GenerateOptions
from flyspec.engine.loading import load_model
from flyspec.rules import Rule
from flyspec.values.generation import RoundRecord
from flyspec.values.rounds import Outcome
from flyspec.values.tokens import Origin, SamplingParams
from tests.orchestrator.stacks import start_stack
from tests.scripted_heads import ScriptedHead
from verify_service import warm_target

EXACT = Rule("exact")
PROMPT = "The cat sat on the mat, and the dog sat"
LAYERS = (0, 1, -1)


@pytest.fixture(scope="module")
def head_of(model_dirs):
    """A head that guesses the target's own token three times in four, and checks its rows."""
    model = load_model(model_dirs[0], "cpu", "float64").model

    @functools.cache
    def run(tokens):
        with torch.inference_mode():
            return model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)

    def guess(tokens):
        own = int(run(tuple(tokens)).logits[0, -1].argmax())
        return own if sum(tokens) % 4 else (own + 1) % 400

    def rows(tokens, layers):
        hidden = run(tuple(tokens)).hidden_states
        return [hidden[layer][0] for layer in layers]

    return lambda: ScriptedHead(guess, 5, LAYERS, rows)


@pytest.fixture(scope="module")
async def stack(model_dirs, head_of):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm_target, "load_head", lambda *_: head_of(), raising=False)
        async with start_stack(model_dirs, verify={"heads": "head=/somewhere"}) as running:
            yield running


def options(**changes):
    values = {"rule": EXACT, "max_tokens": 40, "ignore_eos": True, "num_speculative_tokens": 4}
    return GenerateOptions(**{**values, **changes})


async def tokens_of(stack, asked, prompt=PROMPT):
    return [
        token
        async for event in stack.client.generate(prompt, asked)
        if isinstance(event, Chunk)
        for token in event.token_ids
    ]


async def test_a_head_is_listed_with_what_is_known_of_it(stack):
    drafters = {d.name: d for d in await stack.admin.list_drafters()}
    head, relay = drafters["head"], drafters["relay"]
    assert (head.kind, head.usable, head.model.num_parameters) == ("scripted", True, 7)
    assert head.model.weights_fingerprint == stack.verify_engine.heads.infos[0].fingerprint
    assert [replica.address for replica in head.replicas] == [
        target.address for target in (await stack.admin.status()).targets
    ]
    assert (relay.kind, relay.usable) == ("relay", True)


@pytest.mark.parametrize(
    ("drafter", "k"),
    [("head", 1), ("head", "auto"), ("relay", 4), ("relay", 15), ("relay", "auto")],
)
async def test_greedy_text_is_transformers_own(stack, greedy, drafter, k):
    asked = options(drafter=drafter, num_speculative_tokens=k)
    found = await stack.client.complete(PROMPT, asked)
    assert found.token_ids == greedy(found.started.prompt_token_ids, 40)
    if k != "auto":
        assert [share.drafter for share in found.completion.drafters] == [drafter]
        assert found.origins.count(Origin.EXACT_MODEL) > 10
    assert not sum(stack.verify_engine.heads.failures.values())
    assert await stack.idle()


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(0.9), SamplingParams(1.0, 0.9, 50), SamplingParams(0.7, presence_penalty=1.0)],
)
async def test_sampled_text_is_that_of_plain_decoding(stack, sampling):
    async def text(drafter, k):
        return await tokens_of(
            stack, options(drafter=drafter, num_speculative_tokens=k, sampling=sampling, seed=5)
        )

    plain = await text("", 0)
    for drafter, k in (("head", 4), ("relay", 9)):
        assert await text(drafter, k) == plain


@pytest.mark.parametrize(
    ("rule", "drafter", "temperature"),
    [
        ("fly", "head", 0.0), ("margin", "relay", 0.0), ("fuzzy", "relay", 0.0),
        ("fuzzy", "head", 1.0), ("rejection", "head", 1.0), ("ensemble", "relay", 1.0),
    ],
)  # fmt: skip
async def test_every_rule_runs_with_heads(stack, rule, drafter, temperature):
    """Windows, budgets, distributions and log-probabilities go with a head's drafts."""
    asked = options(
        rule=Rule(rule), drafter=drafter, max_loose_tokens=5, return_rounds=True, logprobs=2,
        sampling=SamplingParams(temperature), seed=3,
    )  # fmt: skip
    rounds, tokens = [], []
    async for event in stack.client.generate(PROMPT, asked):
        if isinstance(event, RoundRecord):
            rounds.append(event)
        elif isinstance(event, Chunk):
            tokens += event.token_ids
    assert len(tokens) == 40
    assert max(len(r.draft_token_ids) for r in rounds) == 4
    outcomes = [d.outcome for r in rounds for d in r.decisions]
    assert outcomes.count(Outcome.LOOSE) + outcomes.count(Outcome.PROVISIONAL) <= 12
    assert not sum(stack.verify_engine.heads.failures.values())
    # Its Ks, given back, give the text again.
    found = await stack.client.complete(PROMPT, asked)
    assert found.token_ids == tokens
    assert await stack.idle()


async def test_a_head_that_breaks_mid_text_gives_way(stack, greedy):
    (head,) = stack.verify_engine.heads._heads.values()
    head.fails = lambda step: len(step.token_ids) < 5 and step.start > 40
    try:
        found = await stack.client.complete(PROMPT, options(drafter="head", max_tokens=50))
    finally:
        head.fails = lambda step: False
    assert found.token_ids == greedy(found.started.prompt_token_ids, 50)
    drafters = [share.drafter for share in found.completion.drafters]
    assert drafters[0] == "head"
    assert len(drafters) > 1
    assert stack.verify_engine.heads.failures["head"] == 1
    assert await stack.idle()
