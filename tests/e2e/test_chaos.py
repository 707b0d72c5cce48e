"""Every stream survives whatever happens to the services, and the suite would notice otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flyspec.client import Chat, GenerateOptions
from flyspec.client.recordings import recordable
from flyspec.rules import Rule
from flyspec_lab.report import Results
from flyspec_lab.word_problems import problems
from loadtest.chaos.__main__ import ChaosOptions, disturb, judge_again, report
from loadtest.chaos.faults import INNER, OUTER
from loadtest.chaos.work import EXACT, Request


async def check(options, kinds=(*OUTER, *INNER)):
    done = await disturb(options, print)
    found = report(done, print)
    assert Results().finish(found) == 0
    assert {request.lossy for request in done.requests if request.generation} == {False, True}
    assert {kind for kind, _ in done.faults} == set(kinds)
    return found.document["recoveries"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("small", [True, pytest.param(False, marks=pytest.mark.full)])
async def test_one_fault_of_each_kind(small):
    options = ChaosOptions(seed=5, once=True, streams=8, texts=8, lossy_share=0.4, small=small)
    assert len(await check(options, OUTER if small else (*OUTER, *INNER))) > 1


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_five_minutes_of_random_faults():
    recoveries = await check(ChaosOptions(seed=5))
    assert {"target reopened", "drafter fallback", "drafter restored"} <= set(recoveries)


async def told(stack, rule, k):
    """A generation, as one of the suite's requests."""
    (problem,) = problems("replay", 1)
    options = GenerateOptions(rule=rule, num_speculative_tokens=k, max_tokens=24, seed=1)
    prompt = Chat.of_user(problem.question)
    async with stack.client() as client:
        generation = await client.complete(prompt, recordable(options))
    return Request(1, prompt, options, generation=generation)


async def test_a_lossy_text_is_judged_again_and_an_altered_one_found(bundled_stack):
    honest = await told(bundled_stack, Rule("margin", margin_threshold=1.0, fly_window_size=4), 4)
    assert judge_again([honest]) == {}
    generation = honest.generation
    fewer = replace(honest, generation=replace(generation, rounds=generation.rounds[:-1]))
    other = replace(honest, generation=changed_token(generation))
    for altered in (fewer, other):
        assert list(judge_again([altered])) == [str(altered)]


async def test_a_request_that_ends_badly_is_noticed(stack):
    request = await told(stack, EXACT, 15)
    generation = request.expected = request.generation
    assert request.problem == ""
    lost = replace(generation, chunks=generation.chunks[:-1])
    assert "tokens came" in replace(request, generation=lost).problem
    other = changed_token(generation)
    assert "differs from the fault-free" in replace(request, generation=other).problem
    assert "UnavailableError" in replace(request, generation=None, error="UnavailableError").problem


def changed_token(generation):
    first, *rest = generation.chunks
    return replace(
        generation,
        chunks=[replace(first, token_ids=[first.token_ids[0] ^ 1, *first.token_ids[1:]]), *rest],
    )
