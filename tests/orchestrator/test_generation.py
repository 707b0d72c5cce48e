"""Generations through three real services, in float64, against transformers' greedy generate."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace

import pytest

from flyspec.client import Chat, Chunk, GenerateOptions
from flyspec.drafter_names import DRAFTER_KINDS, NEED_DATASTORE
from flyspec.errors import FlyspecError
from flyspec.rules import Rule
from flyspec.values.generation import FinishReason
from flyspec.values.tokens import Origin, SamplingParams
from tests.orchestrator.stacks import held, start_stack

DRAFTERS = sorted(set(DRAFTER_KINDS) - NEED_DATASTORE)
EXACT = Rule("exact")
PROMPT = "The cat sat on the mat, and the dog sat"


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("k", [0, 1, 4, 15, "auto"])
async def test_exact_equals_generate(stack, greedy, drafter, k):
    options = GenerateOptions(rule=EXACT, drafter=drafter, num_speculative_tokens=k, max_tokens=50)
    for prompt in (PROMPT, "def total(values):", [7, 9, 11, 200, 7, 9], "数学 😀"):
        generation = await stack.client.complete(prompt, options)
        ids = list(generation.started.prompt_token_ids)
        assert generation.token_ids == greedy(ids, 50)
        metrics = generation.completion.speculation
        assert metrics.num_loose_tokens == 0
        if k == 0:
            assert set(generation.origins) == {Origin.PLAIN}
            assert metrics.num_spec_steps == 0
    assert await stack.idle()


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("sampling", [SamplingParams(1.0), SamplingParams(0.8, 0.9, 40)])
async def test_exact_is_drafter_invariant_at_any_temperature(stack, drafter, sampling):
    async def text(k):
        options = GenerateOptions(
            rule=EXACT,
            drafter=drafter,
            num_speculative_tokens=k,
            max_tokens=40,
            sampling=sampling,
            seed=1234,
        )
        return (await stack.client.complete(PROMPT, options)).token_ids

    plain = await text(0)
    for k in (1, 4, 15):
        assert await text(k) == plain
    assert await text(0) == plain


async def test_a_drawn_seed_is_told_and_repeats_the_text(stack):
    options = GenerateOptions(
        sampling=SamplingParams(1.0), max_tokens=30, num_speculative_tokens=15
    )
    first = await stack.client.complete(PROMPT, options)
    again = await stack.client.complete(PROMPT, replace(options, seed=first.started.seed))
    other = await stack.client.complete(PROMPT, options)
    assert again.text == first.text
    assert other.started.seed != first.started.seed
    assert other.text != first.text


async def test_many_at_once_are_each_as_alone(stack, greedy):
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 400) for _ in range(rng.randint(1, 30))] for _ in range(24)]

    async def one(prompt):
        options = GenerateOptions(
            rule=EXACT,
            drafter=rng.choice(DRAFTERS),
            num_speculative_tokens=rng.choice([0, 1, 4, 15]),
            max_tokens=30,
        )
        return (await stack.client.complete(prompt, options)).token_ids

    texts = await asyncio.gather(*(one(p) for p in prompts))
    assert texts == [greedy(p, 30) for p in prompts]
    assert await stack.idle()


async def test_a_loose_text_does_not_end_at_a_loose_stop_token(stack):
    loose = Rule("random", random_acceptance=0.6, fly_window_size=0)
    options = GenerateOptions(
        rule=loose, max_tokens=60, num_speculative_tokens=6, seed=4, ignore_eos=True
    )
    first = await stack.client.complete(PROMPT, options)
    accepted = zip(first.token_ids, first.origins, strict=True)
    stops = list({token for token, origin in accepted if origin is Origin.LOOSE})
    again = await stack.client.complete(PROMPT, replace(options, stop_token_ids=stops))
    ends = [o for t, o in zip(again.token_ids, again.origins, strict=True) if t in stops]
    assert Origin.LOOSE not in ends
    assert again.token_ids != first.token_ids[: len(again.token_ids)]
    assert [*again.started.stop_token_ids] == sorted(stops)


async def test_what_a_generation_tells(stack):
    options = GenerateOptions(rule=Rule("fly"), max_tokens=60, num_speculative_tokens=8)
    generation = await stack.client.complete(PROMPT, options)
    started, completion = generation.started, generation.completion
    assert started.rule.fly_window_size == 6
    assert started.rule.fly_entropy_threshold == 0.3
    assert started.drafter == "model"
    assert completion.prompt_tokens == len(started.prompt_token_ids)
    assert completion.completion_tokens == len(generation.token_ids) == len(generation.origins)
    metrics = completion.speculation
    assert metrics.num_loose_tokens == generation.origins.count(Origin.LOOSE)
    assert sum(metrics.acceptance_histogram) == metrics.num_spec_steps
    assert (
        sum(i * n for i, n in enumerate(metrics.acceptance_histogram))
        == metrics.num_accepted_draft_tokens
    )
    timings = completion.timings
    assert timings.total_ns >= timings.time_to_first_token_ns > 0
    assert timings.judge_ns > 0


async def test_fly_is_independent_of_max_tokens(stack):
    def options(n):
        rule = Rule("fly-paper", fly_entropy_threshold=0.05)
        return GenerateOptions(rule=rule, num_speculative_tokens=15, max_tokens=n)

    long = (await stack.client.complete(PROMPT, options(60))).token_ids
    for n in (1, 7, 30):
        assert (await stack.client.complete(PROMPT, options(n))).token_ids == long[:n]


async def test_budgets_and_the_exact_prefix(stack, greedy):
    loose = Rule("fly", fly_window_size=0, fly_entropy_threshold=0.0)
    options = GenerateOptions(rule=loose, num_speculative_tokens=15, max_tokens=50)
    free = await stack.client.complete(PROMPT, options)
    assert free.completion.speculation.num_loose_tokens > 4
    capped = await stack.client.complete(PROMPT, replace(options, max_loose_tokens=3))
    assert capped.completion.speculation.num_loose_tokens == 3
    cheap = await stack.client.complete(PROMPT, replace(options, max_loose_cost_nats=2.0))
    assert cheap.completion.speculation.loose_cost_nats <= 2.0
    ids = list(free.started.prompt_token_ids)
    prefixed = await stack.client.complete(PROMPT, replace(options, exact_prefix_tokens=20))
    assert prefixed.token_ids[:20] == greedy(ids, 20)
    assert Origin.LOOSE not in prefixed.origins[:20]
    none = await stack.client.complete(
        PROMPT, GenerateOptions(rule=loose, max_tokens=50, max_loose_tokens=0)
    )
    assert none.token_ids == greedy(ids, 50)


async def test_an_exact_prefix_may_be_longer_than_the_context(stack, greedy):
    loose = Rule("fly", fly_window_size=0, fly_entropy_threshold=0.0)
    options = GenerateOptions(rule=loose, max_tokens=30, exact_prefix_tokens=2**32 - 1)
    generation = await stack.client.complete(PROMPT, options)
    assert generation.token_ids == greedy(generation.started.prompt_token_ids, 30)


@pytest.mark.parametrize("k", [0, 1, 15])
@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_room_for_one_token(stack, greedy, drafter, k):
    prompt = [random.Random(8).randrange(3, 400) for _ in range(255)]
    for max_tokens in (None, 1):
        options = GenerateOptions(
            rule=EXACT, drafter=drafter, num_speculative_tokens=k, max_tokens=max_tokens
        )
        generation = await stack.client.complete(prompt, options)
        assert generation.token_ids == greedy(prompt, 1)
        assert generation.completion.finish_reason is FinishReason.LENGTH


async def test_a_stop_string_inside_an_accepted_run(stack):
    plain = await stack.client.complete(PROMPT, GenerateOptions(rule=EXACT, max_tokens=60))
    stop = plain.text[20:23]
    cut = plain.text.index(stop)
    for k in (0, 15):
        stopped = await stack.client.complete(
            PROMPT,
            GenerateOptions(rule=EXACT, max_tokens=60, stop=[stop], num_speculative_tokens=k),
        )
        assert stopped.text == plain.text[:cut]
        assert stopped.completion.finish_reason is FinishReason.STOP
        assert stopped.completion.stop_reason == stop


async def test_the_end_of_the_context_is_a_length_limit(stack):
    prompt = [random.Random(5).randrange(3, 400) for _ in range(200)]
    generation = await stack.client.complete(prompt, GenerateOptions(ignore_eos=True, rule=EXACT))
    assert generation.completion.completion_tokens == 256 - 200
    assert generation.completion.finish_reason is FinishReason.LENGTH


async def test_chat(stack):
    generation = await stack.client.complete(
        Chat.of_user("hi there"), GenerateOptions(max_tokens=3)
    )
    assert generation.started.prompt_token_ids[0] == 0


@pytest.mark.parametrize(
    ("prompt", "options", "status", "text"),
    [
        ("", {}, "INVALID_ARGUMENT", "empty"),
        ([], {}, "INVALID_ARGUMENT", "no token ids"),
        (Chat(()), {}, "INVALID_ARGUMENT", "send at least one"),
        ([5] * 256, {}, "INVALID_ARGUMENT", "shorten it"),
        ("word " * 20_000, {}, "INVALID_ARGUMENT", "shorten it"),
        ([400], {}, "INVALID_ARGUMENT", "ids 0 to 399"),
        ("x", {"rule": Rule("loose")}, "INVALID_ARGUMENT", "exact, fly"),
        (
            "x",
            {"rule": Rule("fly-paper", fly_entropy_threshold=1.5)},
            "INVALID_ARGUMENT",
            "between 0 and 1",
        ),
        ("x", {"rule": Rule("fly", fly_window_size=2000)}, "INVALID_ARGUMENT", "1024"),
        ("x", {"num_speculative_tokens": 65}, "INVALID_ARGUMENT", "between 0 and 64"),
        ("x", {"max_tokens": 0}, "INVALID_ARGUMENT", "max_tokens"),
        ("x", {"sampling": SamplingParams(-1.0)}, "INVALID_ARGUMENT", "temperature"),
        ("x", {"sampling": SamplingParams(1.0, 0.0)}, "INVALID_ARGUMENT", "top_p"),
        ("x", {"stop": [""]}, "INVALID_ARGUMENT", "stop"),
        ("x", {"max_loose_cost_nats": float("nan")}, "INVALID_ARGUMENT", "max_loose_cost"),
        ("x", {"drafter": "nobody"}, "NOT_FOUND", "model, multi_level, prompt_lookup"),
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


async def test_leaving_in_mid_stream_leaves_nothing_behind(stack):
    async def leave_after(chunks):
        async with aclosing(
            stack.client.generate(PROMPT, GenerateOptions(ignore_eos=True, rule=EXACT))
        ) as events:
            async for event in events:
                chunks -= isinstance(event, Chunk)
                if chunks <= 0:
                    return

    await asyncio.gather(*(leave_after(i % 5) for i in range(60)))
    assert await stack.idle()


async def test_two_hundred_cancelled_requests_do_not_wedge_anything(stack, greedy):
    tasks = [
        asyncio.create_task(
            stack.client.complete(PROMPT, GenerateOptions(ignore_eos=True, rule=EXACT))
        )
        for _ in range(200)
    ]
    await asyncio.sleep(0.3)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert await stack.idle()
    generation = await stack.client.complete(PROMPT, GenerateOptions(rule=EXACT, max_tokens=20))
    assert generation.token_ids == greedy(generation.started.prompt_token_ids, 20)


async def test_too_many_waiting_are_refused(model_dirs):
    async with start_stack(model_dirs, max_concurrent=1, max_waiting=2) as stack:
        with held(stack):
            tasks = [
                asyncio.create_task(
                    stack.client.complete(
                        PROMPT, GenerateOptions(ignore_eos=True, rule=EXACT, max_tokens=40)
                    )
                )
                for _ in range(6)
            ]
            await stack.until(refused_total=3)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [r for r in results if isinstance(r, FlyspecError)]
        assert {r.status for r in refused} == {"RESOURCE_EXHAUSTED"}
        assert len(refused) == 3
        assert await stack.idle()


async def test_a_drafter_of_another_tokenizer_is_translated(model_dirs, tmp_path, greedy):
    from tests.tiny import make_model

    other = str(make_model(tmp_path / "other", text="completely different words here " * 9))
    async with start_stack((model_dirs[0], other)) as stack:
        options = GenerateOptions(
            max_tokens=12, ignore_eos=True, rule=EXACT, num_draft_tokens_per_round=[4]
        )
        generation = await stack.client.complete(PROMPT, options)
        prompt = generation.started.prompt_token_ids
        assert generation.token_ids == greedy(prompt, 12)
        (share,) = generation.completion.drafters
        assert (share.drafter, share.num_draft_tokens > 0) == ("model", True)
        drafters = {d.name: d for d in await stack.admin.list_drafters()}
        assert {n: d.translated for n, d in drafters.items()} == {
            "model": True,
            "multi_level": True,
            "prompt_lookup": False,
            "token_recycling": False,
            "composed": True,
        }
        assert all(d.usable for d in drafters.values())


async def test_a_lost_drafter_does_not_stop_a_stream(model_dirs, greedy):
    async with start_stack(model_dirs) as stack:
        options = GenerateOptions(
            rule=EXACT, max_tokens=100, ignore_eos=True, num_speculative_tokens=4
        )
        tokens: list[int] = []
        async for event in stack.client.generate(PROMPT, options):
            if isinstance(event, Chunk):
                if not tokens:
                    await stack.draft_server.stop(0)
                tokens += event.token_ids
        plain = await stack.client.complete(
            PROMPT,
            GenerateOptions(rule=EXACT, max_tokens=100, ignore_eos=True, num_speculative_tokens=0),
        )
        assert tokens == plain.token_ids
