"""Generations through three real services, in float64, against transformers' greedy generate."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from flyspec.client import GenerateOptions
from flyspec.drafter_names import DRAFTER_KINDS, NEED_DATASTORE
from flyspec.errors import FlyspecError
from flyspec.rules import Rule
from flyspec.values.generation import FinishReason
from flyspec.values.tokens import Origin, SamplingParams
from tests.examples import examples
from tests.orchestrator.stacks import start_stack
from tests.tiny import make_model

DRAFTERS = sorted(set(DRAFTER_KINDS) - NEED_DATASTORE)
EXACT = Rule("exact")
PROMPT = "The cat sat on the mat, and the dog sat"
PROMPTS = (PROMPT, "数学 😀", "def total(values):", [7, 9, 11, 200, 7, 9])


def asked(k=None, rule=EXACT, **options):
    return GenerateOptions(rule=rule, num_speculative_tokens=k, **options)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("k", [0, 1, 4, 15, "auto"])
async def test_exact_equals_generate(stack, greedy, drafter, k):
    for prompt in PROMPTS[: examples(2)]:
        generation = await stack.client.complete(prompt, asked(k, drafter=drafter, max_tokens=40))
        assert generation.token_ids == greedy(generation.started.prompt_token_ids, 40)
        metrics = generation.completion.speculation
        assert metrics.num_loose_tokens == 0
        if k == 0:
            assert set(generation.origins) == {Origin.PLAIN}
            assert metrics.num_spec_steps == 0
    assert await stack.idle()


@pytest.mark.parametrize("sampling", [SamplingParams(1.0), SamplingParams(0.8, 0.9, 40)])
async def test_exact_is_drafter_invariant_at_any_temperature(stack, sampling):
    options = asked(0, sampling=sampling, seed=1234, max_tokens=30)
    plain = await stack.client.complete(PROMPT, options)
    for drafter in DRAFTERS:
        for k in (4, 15, 1)[: examples(1)]:
            options = replace(options, drafter=drafter, num_speculative_tokens=k)
            assert (await stack.client.complete(PROMPT, options)).token_ids == plain.token_ids
    other = await stack.client.complete(PROMPT, replace(options, seed=None))
    assert other.token_ids != plain.token_ids


async def test_a_loose_text_does_not_end_at_a_loose_stop_token(stack):
    loose = Rule("random", random_acceptance=0.6, fly_window_size=0)
    options = asked(6, loose, max_tokens=60, seed=4, ignore_eos=True)
    first = await stack.client.complete(PROMPT, options)
    accepted = zip(first.token_ids, first.origins, strict=True)
    stops = list({token for token, origin in accepted if origin is Origin.LOOSE})
    again = await stack.client.complete(PROMPT, replace(options, stop_token_ids=stops))
    ends = [o for t, o in zip(again.token_ids, again.origins, strict=True) if t in stops]
    assert Origin.LOOSE not in ends
    assert again.token_ids != first.token_ids[: len(again.token_ids)]
    assert [*again.started.stop_token_ids] == sorted(stops)


async def test_what_a_generation_tells(stack):
    generation = await stack.client.complete(PROMPT, asked(8, Rule("fly"), max_tokens=60))
    started, completion = generation.started, generation.completion
    assert (started.rule.fly_window_size, started.rule.fly_entropy_threshold) == (6, 0.3)
    assert started.drafter == "model"
    assert completion.prompt_tokens == len(started.prompt_token_ids)
    assert completion.completion_tokens == len(generation.token_ids) == len(generation.origins)
    metrics = completion.speculation
    assert metrics.num_loose_tokens == generation.origins.count(Origin.LOOSE)
    histogram = metrics.acceptance_histogram
    assert sum(histogram) == metrics.num_spec_steps
    assert sum(i * n for i, n in enumerate(histogram)) == metrics.num_accepted_draft_tokens
    timings = completion.timings
    assert timings.total_ns >= timings.time_to_first_token_ns > 0
    assert timings.judge_ns > 0


async def test_fly_is_independent_of_max_tokens(stack):
    rule = Rule("fly-paper", fly_entropy_threshold=0.05)
    long = await stack.client.complete(PROMPT, asked(15, rule, max_tokens=60))
    for n in (1, 7, 30):
        short = await stack.client.complete(PROMPT, asked(15, rule, max_tokens=n))
        assert short.token_ids == long.token_ids[:n]


async def test_budgets_and_the_exact_prefix(stack, greedy):
    options = asked(15, Rule("fly", fly_window_size=0, fly_entropy_threshold=0.0), max_tokens=50)

    async def of(**changes):
        return await stack.client.complete(PROMPT, replace(options, **changes))

    free = await of()
    assert free.completion.speculation.num_loose_tokens > 4
    assert (await of(max_loose_tokens=3)).completion.speculation.num_loose_tokens == 3
    assert (await of(max_loose_cost_nats=2.0)).completion.speculation.loose_cost_nats <= 2.0
    exact = greedy(free.started.prompt_token_ids, 50)
    prefixed = await of(exact_prefix_tokens=20)
    assert prefixed.token_ids[:20] == exact[:20]
    assert Origin.LOOSE not in prefixed.origins[:20]
    for nothing in ({"max_loose_tokens": 0}, {"exact_prefix_tokens": 2**32 - 1}):
        assert (await of(**nothing)).token_ids == exact


@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_room_for_one_token(stack, greedy, drafter):
    prompt = [random.Random(8).randrange(3, 400) for _ in range(255)]
    for k, max_tokens in ((0, None), (1, 1), (15, None)):
        options = asked(k, drafter=drafter, max_tokens=max_tokens)
        generation = await stack.client.complete(prompt, options)
        assert generation.token_ids == greedy(prompt, 1)
        assert generation.completion.finish_reason is FinishReason.LENGTH


async def test_the_end_of_the_context_is_a_length_limit(stack):
    prompt = [random.Random(5).randrange(3, 400) for _ in range(200)]
    generation = await stack.client.complete(prompt, asked(ignore_eos=True))
    assert generation.completion.completion_tokens == 256 - 200
    assert generation.completion.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prompt", "options", "status", "text"),
    [
        ("word " * 20_000, {}, "INVALID_ARGUMENT", "shorten it"),
        # Longer than a status may be, and its characters are of four bytes.
        ("x", {"drafter": "😀" * 9999}, "NOT_FOUND", "model, multi_level, prompt_lookup"),
        ("x", {"rule": Rule("x" * 99999)}, "INVALID_ARGUMENT", "exact, fly"),
    ],
)
async def test_bad_requests_are_refused_by_name(stack, prompt, options, status, text):
    with pytest.raises(FlyspecError) as caught:
        await stack.client.complete(prompt, GenerateOptions(**options))
    assert (caught.value.status, text in str(caught.value)) == (status, True), caught.value
    assert (await stack.client.complete("x", GenerateOptions(max_tokens=2))).token_ids
    assert await stack.idle()


async def test_a_drafter_of_another_tokenizer_is_translated(model_dirs, tmp_path, greedy):
    other = str(make_model(tmp_path / "other", text="completely different words here " * 9))
    async with start_stack((model_dirs[0], other)) as stack:
        options = asked(max_tokens=12, ignore_eos=True, num_draft_tokens_per_round=[4])
        generation = await stack.client.complete(PROMPT, options)
        assert generation.token_ids == greedy(generation.started.prompt_token_ids, 12)
        (share,) = generation.completion.drafters
        assert (share.drafter, share.num_draft_tokens > 0) == ("model", True)
        drafters = await stack.admin.list_drafters()
        assert {d.name for d in drafters if d.translated} == {"model", "multi_level", "composed"}
        assert all(d.usable for d in drafters)
