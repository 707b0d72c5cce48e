"""Exact twins: what is compared, what is a violation, and which request goes first."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from flyspec.client import GenerateOptions
from flyspec.rules import Rule
from flyspec.values.generation import FinishReason
from orchestrator.exact_twins import TwinOutcome
from tests.orchestrator.stacks import slow, start_stack
from tests.waiting import until
from verify_service.verdicts import RoundJudge

PROMPT = "The cat sat on the mat, and the dog sat"
LOOSE = Rule("random", random_acceptance=0.5)
FLY = GenerateOptions(rule=Rule("fly"), max_tokens=40, ignore_eos=True, num_speculative_tokens=4)
WIDE = replace(FLY, rule=LOOSE)


def twin_stack(model_dirs, **options):
    """A stack in which each lossy text has a twin, on a batch-invariant target."""
    verify = {"batch_invariant": True, "max_sessions": 8}
    return start_stack(model_dirs, verify=verify, **{"exact_twin_share": 1.0, **options})


def number(stack, name, **labels) -> float:
    return stack.registry.get_sample_value(f"flyspec_exact_twin{name}_total", labels or None)


def outcomes(stack) -> dict[str, float]:
    found = {outcome: number(stack, "s", outcome=outcome) for outcome in TwinOutcome}
    return {outcome: count for outcome, count in found.items() if count}


async def until_compared(stack, count) -> None:
    await until(lambda: sum(outcomes(stack).values()) == count)


async def test_a_loose_text_is_compared_up_to_where_it_parts(model_dirs, greedy):
    async with twin_stack(model_dirs) as stack:
        text = await stack.client.complete(PROMPT, WIDE)
        assert text.completion.speculation.num_loose_tokens
        await until_compared(stack, 1)
        expected = greedy(text.started.prompt_token_ids, 40)
        same = next(
            i for i, (a, b) in enumerate(zip(text.token_ids, expected, strict=True)) if a != b
        )
        assert outcomes(stack) == {TwinOutcome.DIFFERS: 1}
        assert (number(stack, "_tokens"), number(stack, "_same_tokens")) == (40, same)
        assert await stack.idle()


async def test_a_text_without_loose_tokens_is_the_exact_one(model_dirs):
    async with twin_stack(model_dirs) as stack:
        for seed in range(3):
            options = replace(FLY, rule=Rule("margin", margin_threshold=0.0), seed=seed)
            text = await stack.client.complete(f"{seed} {PROMPT}", options)
            assert not text.completion.speculation.num_loose_tokens
            await until_compared(stack, seed + 1)
        assert outcomes(stack) == {TwinOutcome.SAME: 3}


async def test_exact_and_undrafted_texts_have_no_twins(model_dirs):
    async with twin_stack(model_dirs) as stack:
        for options in (replace(FLY, rule=Rule("exact")), replace(FLY, num_speculative_tokens=0)):
            await stack.client.complete(PROMPT, options)
        await stack.client.complete(PROMPT, FLY)
        await until_compared(stack, 1)


async def test_what_is_loosened_in_silence_is_a_violation(model_dirs, monkeypatch):
    """A target that accepts a token other than its own without reporting it."""
    async with twin_stack(model_dirs) as stack:
        decide = RoundJudge.decide

        def cheat(*arguments):
            verdict = decide(*arguments)
            return replace(verdict, next_token_id=(verdict.next_token_id + 1) % 400)

        monkeypatch.setattr(RoundJudge, "decide", cheat)
        strict = replace(FLY, rule=Rule("margin", margin_threshold=0.0))
        text = await stack.client.complete(PROMPT, strict)
        assert text.completion.finish_reason is FinishReason.LENGTH
        await until_compared(stack, 1)
        assert outcomes(stack) == {TwinOutcome.VIOLATION: 1}


async def test_a_twin_gives_way_to_requests(model_dirs):
    async with twin_stack(model_dirs) as stack:
        slow(stack)
        long = replace(FLY, rule=LOOSE, max_tokens=100)
        await stack.client.complete(PROMPT, long)
        exact = replace(FLY, rule=Rule("exact"), max_tokens=60)
        work = [stack.client.complete(f"{n} {PROMPT}", exact) for n in range(8)]
        texts = await asyncio.gather(*work)
        assert all(len(text.token_ids) == 60 for text in texts)
        await until_compared(stack, 1)
        assert outcomes(stack) == {TwinOutcome.GAVE_WAY: 1}


async def test_an_orchestrator_that_ends_waits_for_no_twin(model_dirs):
    async with twin_stack(model_dirs) as stack:
        slow(stack)
        await stack.client.complete(PROMPT, replace(FLY, max_tokens=150))
        await until(lambda: stack.verify_engine.sessions.opened_total == 2)  # the twin's
        await stack.orchestrator.stop(0)
        await until(lambda: not stack.verify_engine.sessions.active)
        assert not outcomes(stack)
