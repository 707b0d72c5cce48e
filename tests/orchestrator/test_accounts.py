"""What a generation reports, through three real services: log-probs, bytes, loops, warnings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flyspec.client import Chunk, GenerateOptions
from flyspec.rules import Rule
from flyspec.values.tokens import Origin, SamplingParams
from tests.orchestrator.near_target import MARGIN, PROMPTS
from tests.orchestrator.stacks import start_stack


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.8, top_k=30)])
@pytest.mark.parametrize(("rule", "k"), [(Rule("exact"), 0), (Rule("exact"), 4), (MARGIN, 4)])
async def test_logprobs_are_those_of_the_model(near_stack, near_models, sampling, rule, k):
    options = GenerateOptions(
        rule=rule,
        sampling=sampling,
        seed=5,
        num_speculative_tokens=k,
        max_tokens=30,
        logprobs=3,
    )
    for prompt in PROMPTS[:3]:
        generation = await near_stack.client.complete(prompt, options)
        tokens = list(generation.started.prompt_token_ids)
        assert len(generation.logprobs) == len(generation.token_ids)
        for token, told in zip(generation.token_ids, generation.logprobs, strict=True):
            row = near_models.log_probs(tokens)
            assert told.logprob == pytest.approx(float(row[token]), abs=1e-4)
            top = row.topk(3)
            assert list(told.top_token_ids) == top.indices.tolist()
            assert list(told.top_logprobs) == pytest.approx(top.values.tolist(), abs=1e-4)
            tokens.append(token)
    none = await near_stack.client.complete(PROMPTS[0], replace(options, logprobs=None))
    assert none.logprobs == []
    zero = await near_stack.client.complete(PROMPTS[0], replace(options, logprobs=0))
    assert all(told.top_token_ids == () for told in zero.logprobs)


async def test_rounds_without_distributions_are_small(near_stack):
    for rule in (Rule("exact"), Rule("fly"), Rule("fly", fly_window_size=1), MARGIN):
        options = GenerateOptions(rule=rule, num_speculative_tokens=15, max_tokens=60)
        for prompt in PROMPTS:
            metrics = (await near_stack.client.complete(prompt, options)).completion.speculation
            assert 0 < metrics.round_bytes < 380 * metrics.num_rounds
            assert metrics.distribution_bytes == 0


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
async def test_rejection_repeats_with_its_seed_and_survives_a_lost_target(near_dirs, drafter):
    options = GenerateOptions(
        rule=Rule("rejection"),
        sampling=SamplingParams(1.0),
        drafter=drafter,
        seed=11,
        num_speculative_tokens=5,
        max_tokens=40,
        ignore_eos=True,
    )
    async with start_stack(near_dirs) as stack:
        alone = await stack.client.complete(PROMPTS[0], options)
        tokens: list[int] = []
        async for event in stack.client.generate(PROMPTS[0], options):
            if isinstance(event, Chunk):
                if not tokens:
                    await stack.restart_verify()
                tokens += event.token_ids
        assert tokens == alone.token_ids


async def test_a_loop_turns_the_rest_exact(near_stack, near_models):
    """Prompt lookup with everything accepted: the text copies itself until the guard intervenes."""
    rule = Rule("random", random_acceptance=1.0, fly_window_size=0)
    options = GenerateOptions(
        rule=rule, drafter="prompt_lookup", num_speculative_tokens=60, max_tokens=150
    )
    prompt = "the cat the cat the cat the cat the"
    # Draft from the first token on: only the first round copies the prompt.
    options = replace(options, num_draft_tokens_per_round=[60])
    generation = await near_stack.client.complete(prompt, options)
    index = generation.completion.loop_guard_token_index
    assert index == 61  # the round in which the cycle was complete, as a whole
    assert Origin.LOOSE in generation.origins[:index]
    assert Origin.LOOSE not in generation.origins[index:]
    tokens = [*generation.started.prompt_token_ids, *generation.token_ids[:index]]
    for token in generation.token_ids[index:]:
        assert token == near_models.own(tokens)
        tokens.append(token)
    unguarded = await near_stack.client.complete(prompt, replace(options, disable_loop_guard=True))
    assert unguarded.completion.loop_guard_token_index is None
    exact = await near_stack.client.complete(prompt, replace(options, rule=Rule("exact")))
    assert exact.completion.loop_guard_token_index is None


async def test_warnings_are_told(near_stack):
    options = GenerateOptions(rule=replace(MARGIN, margin_threshold=0.4), max_tokens=2)
    started = (await near_stack.client.complete("x", options)).started
    assert any("margin_threshold" in warning for warning in started.warnings)
    options = GenerateOptions(rule=Rule("margin"), max_tokens=2)
    assert not (await near_stack.client.complete("x", options)).started.warnings
