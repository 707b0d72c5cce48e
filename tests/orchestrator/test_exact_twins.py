"""Exact twins: what is compared, what is a violation, and which request goes first."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from flyspec.client import GenerateOptions
from flyspec.rules import Rule
from flyspec.values.generation import FinishReason
from flyspec.values.phases import Phase
from orchestrator.exact_twins import TwinOutcome
from tests.examples import examples
from tests.orchestrator.stacks import slow, start_stack
from tests.waiting import until
from verify_service.verdicts import RoundJudge

PROMPT = "The cat sat on the mat, and the dog sat"
LOOSE = Rule("random", random_acceptance=0.5)
FLY = GenerateOptions(rule=Rule("fly"), max_tokens=20, ignore_eos=True, num_speculative_tokens=4)
WIDE = replace(FLY, rule=LOOSE)
NAME = "flyspec_exact_twins_total"


def twin_stack(model_dirs, **options):
    """A stack in which each lossy text has a twin, on a batch-invariant target."""
    verify = {"batch_invariant": True, "max_sessions": 8}
    return start_stack(model_dirs, verify=verify, **{"exact_twin_share": 1.0, **options})


class Twins:
    """A stack, and what its twins have come to since this was made."""

    def __init__(self, stack) -> None:
        self.stack, self.client = stack, stack.client
        self.before = self._counts()

    def _counts(self) -> Counter[str]:
        found = {o: self.stack.registry.get_sample_value(NAME, {"outcome": o}) for o in TwinOutcome}
        for what in ("_tokens", "_same_tokens"):
            found[what] = self.stack.registry.get_sample_value(f"flyspec_exact_twin{what}_total")
        return Counter(found)

    def number(self, what: str) -> int:
        return (self._counts() - self.before)[what]

    @property
    def outcomes(self) -> dict[str, int]:
        return {o: count for o in TwinOutcome if (count := self.number(o))}

    async def until_compared(self, count: int) -> None:
        await until(lambda: sum(self.outcomes.values()) == count, seconds=120.0)


@pytest.fixture(scope="module")
async def shared(model_dirs):
    async with twin_stack(model_dirs) as stack:
        yield stack


@pytest.fixture
async def twins(shared):
    yield Twins(shared)
    assert await shared.idle()


async def test_a_loose_text_is_compared_up_to_where_it_parts(twins, greedy):
    text = await twins.client.complete(PROMPT, WIDE)
    assert text.completion.speculation.num_loose_tokens
    await twins.until_compared(1)
    expected = greedy(text.started.prompt_token_ids, 20)
    same = next(i for i, (a, b) in enumerate(zip(text.token_ids, expected, strict=True)) if a != b)
    assert twins.outcomes == {TwinOutcome.DIFFERS: 1}
    assert (twins.number("_tokens"), twins.number("_same_tokens")) == (20, same)


async def test_a_text_without_loose_tokens_is_the_exact_one(twins):
    for seed in range(examples(1)):
        options = replace(FLY, rule=Rule("margin", margin_threshold=0.0), seed=seed)
        text = await twins.client.complete(f"{seed} {PROMPT}", options)
        assert not text.completion.speculation.num_loose_tokens
        await twins.until_compared(seed + 1)
    assert twins.outcomes == {TwinOutcome.SAME: examples(1)}


async def test_a_text_of_phases_is_compared_if_one_of_them_is_lossy(twins):
    phases = [Phase(LOOSE, until_token_ids=[5]), Phase(Rule("exact"))]
    await twins.client.complete(PROMPT, replace(FLY, phases=phases))
    await twins.until_compared(1)
    assert twins.number(TwinOutcome.VIOLATION) == 0
    exact = [Phase(Rule("exact"), ["a"]), Phase(Rule("exact"))]
    await twins.client.complete(PROMPT, replace(FLY, phases=exact))
    await asyncio.sleep(0.05)
    assert sum(twins.outcomes.values()) == 1


async def test_exact_and_undrafted_texts_have_no_twins(twins):
    for options in (replace(FLY, rule=Rule("exact")), replace(FLY, num_speculative_tokens=0)):
        await twins.client.complete(PROMPT, options)
    await twins.client.complete(PROMPT, FLY)
    await twins.until_compared(1)


async def test_what_is_loosened_in_silence_is_a_violation(twins, monkeypatch):
    """A target that accepts a token other than its own without reporting it."""
    judge_all = RoundJudge.judge_all

    def cheat(*arguments):
        return [
            replace(verdict, next_token_id=(verdict.next_token_id + 1) % 400)
            for verdict in judge_all(*arguments)
        ]

    monkeypatch.setattr(RoundJudge, "judge_all", cheat)
    strict = replace(FLY, rule=Rule("margin", margin_threshold=0.0))
    text = await twins.client.complete(PROMPT, strict)
    assert text.completion.finish_reason is FinishReason.LENGTH
    await twins.until_compared(1)
    assert twins.outcomes == {TwinOutcome.VIOLATION: 1}


async def test_a_twin_gives_way_to_requests(model_dirs):
    async with twin_stack(model_dirs) as stack:
        twins = Twins(stack)
        slow(stack)
        long = replace(FLY, rule=LOOSE, max_tokens=60)
        await stack.client.complete(PROMPT, long)
        exact = replace(FLY, rule=Rule("exact"), max_tokens=20)
        work = [stack.client.complete(f"{n} {PROMPT}", exact) for n in range(8)]
        texts = await asyncio.gather(*work)
        assert all(len(text.token_ids) == 20 for text in texts)
        await twins.until_compared(1)
        assert twins.outcomes == {TwinOutcome.GAVE_WAY: 1}


async def test_an_orchestrator_that_ends_waits_for_no_twin(model_dirs):
    async with twin_stack(model_dirs) as stack:
        twins = Twins(stack)
        slow(stack)
        await stack.client.complete(PROMPT, replace(FLY, max_tokens=150))
        await until(lambda: stack.verify_engine.sessions.opened_total == 2)  # the twin's
        await stack.orchestrator.stop(0)
        await until(lambda: not stack.verify_engine.sessions.active)
        assert not twins.outcomes
