"""A client that lost its orchestrator resumes at another: docs/reliability.md, "Resuming"."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace

import pytest

from flyspec.client import Chunk, GenerateOptions, Started
from flyspec.rules import Rule
from flyspec.values.tokens import SamplingParams
from tests.orchestrator.stacks import orchestrator_over

PROMPT = "the cat sat on"
EXACT = GenerateOptions(rule=Rule("exact"), max_tokens=40, ignore_eos=True)
SAME = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8),
    "truncated": SamplingParams(temperature=0.8, top_p=0.9, top_k=20),
    "repetition": SamplingParams(temperature=0.8, repetition_penalty=1.3),
}
OTHER = {
    "presence": SamplingParams(temperature=0.8, presence_penalty=2.0),
    "frequency": SamplingParams(temperature=0.8, frequency_penalty=2.0),
}


@pytest.fixture(scope="module")
async def other(near_stack):
    async with orchestrator_over(near_stack) as (client, _):
        yield client


async def pieces(stack, other, options, length):
    """The first tokens at one orchestrator, the others at another, and all at the first."""
    received = []
    async with aclosing(stack.client.generate(PROMPT, options)) as events:
        async for event in events:
            if isinstance(event, Started):
                started = event
            if isinstance(event, Chunk):
                received += event.token_ids
                if len(received) >= length:
                    break
    received = received[:length]
    left = started.max_tokens - len(received)
    rest = await other.complete(
        [*started.prompt_token_ids, *received], replace(options, seed=started.seed, max_tokens=left)
    )
    whole = await stack.client.complete(PROMPT, replace(options, seed=started.seed))
    return received + list(rest.token_ids), list(whole.token_ids)


@pytest.mark.parametrize("sampling", SAME.values(), ids=SAME)
async def test_the_text_is_the_undisturbed_one(near_stack, other, sampling):
    options = replace(EXACT, sampling=sampling)
    for length in (1, 17, 39):
        joined, whole = await pieces(near_stack, other, options, length)
        assert joined == whole
        assert len(whole) == 40


@pytest.mark.parametrize("sampling", OTHER.values(), ids=OTHER)
async def test_penalties_of_the_output_take_resent_tokens_for_prompt(near_stack, other, sampling):
    differing = 0
    for seed in range(3):
        options = replace(EXACT, sampling=sampling, seed=seed)
        joined, whole = await pieces(near_stack, other, options, 25)
        assert joined[:25] == whole[:25]
        differing += joined != whole
    assert differing
