"""Sixteen requests at once, each of another kind, against the same requests alone."""

from __future__ import annotations

import asyncio
import math

import pytest

from flyspec.client import Chat, GenerateOptions
from flyspec.rules import Rule
from flyspec.values.tokens import SamplingParams
from flyspec_lab.word_problems import problems

CODE = 'import os\n\ndef read_lines(path):\n    """Return the lines of a text file."""\n'
DRAFTERS = ("model", "multi_level", "prompt_lookup", "")
GREEDY, WARM = SamplingParams(), SamplingParams(0.8, top_p=0.95)
PENALIZED = SamplingParams(0.7, repetition_penalty=1.1, presence_penalty=0.3, min_tokens=6)
WAYS = [
    (Rule("exact"), 15, GREEDY),
    (Rule("exact"), 4, WARM),
    (Rule("exact"), 0, PENALIZED),
    (Rule("fly"), 15, GREEDY),
    (Rule("fly"), 8, WARM),
    (Rule("fly-paper", fly_window_size=2), 8, GREEDY),
    (Rule("fly-reference", fly_window_size=3), 8, WARM),
    (Rule("margin"), 4, GREEDY),
    (Rule("margin", margin_threshold=1.0), 2, WARM),
    (Rule("fuzzy"), 6, GREEDY),
    (Rule("fuzzy-reference"), 6, WARM),
    (Rule("rejection"), 5, WARM),
    (Rule("typical"), 7, PENALIZED),
    (Rule("random"), 15, GREEDY),
    (Rule("margin", margin_threshold=1.0, fly_window_size=3), 1, GREEDY),
    (Rule("fly", fly_window_size=1), 3, GREEDY),
]


def request(number):
    """A prompt, sometimes long, sometimes similar to others, and options to continue it."""
    rule, k, sampling = WAYS[number % len(WAYS)]
    questions = [problem.question for problem in problems("concurrent", 8)]
    prompt = [Chat.of_user(questions[number % 8]), CODE, Chat.of_user("\n".join(questions))]
    options = GenerateOptions(
        sampling=sampling,
        seed=number,
        max_tokens=6 + number % 5 * 6,
        drafter=DRAFTERS[number // 3 % len(DRAFTERS)],
        rule=rule,
        num_speculative_tokens=k,
        logprobs=2 if number % 4 == 0 else None,
    )
    return prompt[number % 3], options


def told(generation):
    """Everything about a generation except times."""
    metrics = generation.completion.speculation
    return (
        generation.text,
        generation.token_ids,
        generation.origins,
        generation.completion.finish_reason,
        [entry.top_token_ids for entry in generation.logprobs],
        metrics.num_rounds,
        metrics.num_draft_tokens,
        metrics.num_accepted_draft_tokens,
        metrics.num_loose_tokens,
        metrics.num_rollbacks,
        metrics.acceptance_histogram,
    )


async def check(stack, number):
    requests = [request(i) for i in range(number)]
    await stack.needs_no_ties()
    async with stack.client() as client:
        together = await asyncio.gather(
            *(client.complete(*request, math.inf) for request in requests)
        )
        alone = [await client.complete(*request) for request in requests]
    for crowded, single, (_, options) in zip(together, alone, requests, strict=True):
        assert told(crowded) == told(single), options
        for one, other in zip(crowded.logprobs, single.logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, rel=1e-5, abs=1e-6)
            assert one.top_logprobs == pytest.approx(other.top_logprobs, rel=1e-5, abs=1e-6)
        assert crowded.loose_gaps_nats == pytest.approx(single.loose_gaps_nats, rel=1e-5, abs=1e-6)
    loose = sum(g.completion.speculation.num_loose_tokens for g in together)
    print(f"{sum(len(g.token_ids) for g in together)} tokens, {loose} of them loose")
    assert loose > 0


async def test_sixteen_at_once_are_told_what_each_is_told_alone(stack):
    await check(stack, 16)


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_two_hundred_at_once_are_told_what_each_is_told_alone(stack):
    await check(stack, 192)
