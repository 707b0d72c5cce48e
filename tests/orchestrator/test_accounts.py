"""What a generation reports, through three real services: log-probs, bytes, loops, warnings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flyspec.client import GenerateOptions
from flyspec.rules import Rule
from flyspec.values.tokens import SamplingParams
from tests.examples import examples
from tests.orchestrator.near_target import MARGIN, PROMPTS
from tests.orchestrator.stacks import generate


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.8, top_k=30)])
@pytest.mark.parametrize(("rule", "k"), [(Rule("exact"), 0), (Rule("exact"), 4), (MARGIN, 4)])
async def test_logprobs_are_those_of_the_model(near_stack, log_probs, sampling, rule, k):
    options = GenerateOptions(
        rule=rule, sampling=sampling, seed=5, num_speculative_tokens=k, max_tokens=20, logprobs=3
    )
    for prompt in PROMPTS[: examples(1)]:
        generation = await near_stack.client.complete(prompt, options)
        tokens = list(generation.started.prompt_token_ids)
        assert len(generation.logprobs) == len(generation.token_ids)
        for token, told in zip(generation.token_ids, generation.logprobs, strict=True):
            row = log_probs.after(tokens)
            assert told.logprob == pytest.approx(float(row[token]), abs=1e-4)
            top = row.topk(3)
            assert list(told.top_token_ids) == top.indices.tolist()
            assert list(told.top_logprobs) == pytest.approx(top.values.tolist(), abs=1e-4)
            tokens.append(token)
    none = await near_stack.client.complete(PROMPTS[0], replace(options, logprobs=None))
    assert none.logprobs == []
    zero = await near_stack.client.complete(PROMPTS[0], replace(options, logprobs=0))
    assert all(told.top_token_ids == () for told in zero.logprobs)


async def test_distributions_travel_and_are_counted(near_stack, greedy):
    """T = 0 accepts only matches: the whole vocabulary and the top k, one half float per token."""
    prompt = PROMPTS[0]
    for top_k, size in ((0, 2 * 400), (50, 2 * 50 + 2 * 50)):
        rule = Rule("fuzzy", divergence_threshold=0.0, divergence_top_k=top_k)
        options = GenerateOptions(rule=rule, num_speculative_tokens=6, max_tokens=40)
        generation = await near_stack.client.complete(prompt, options)
        assert generation.token_ids == greedy(generation.started.prompt_token_ids, 40)
        metrics = generation.completion.speculation
        sent = metrics.distribution_bytes / metrics.num_draft_tokens / 2
        assert 0.8 * size < sent < 1.3 * size
        assert metrics.round_bytes < metrics.distribution_bytes + 380 * metrics.num_rounds


@pytest.mark.parametrize("drafter", ["model", "prompt_lookup", "multi_level", "token_recycling"])
async def test_rejection_repeats_with_its_seed_and_survives_a_lost_target(near_stack, drafter):
    options = GenerateOptions(
        rule=Rule("rejection"), sampling=SamplingParams(1.0), drafter=drafter, seed=11,
        num_speculative_tokens=5, max_tokens=30, ignore_eos=True,
    )  # fmt: skip
    alone = await near_stack.client.complete(PROMPTS[0], options)
    restart = near_stack.restart_verify
    tokens, *_ = await generate(near_stack.client, PROMPTS[0], options, restart)
    assert tokens == alone.token_ids
