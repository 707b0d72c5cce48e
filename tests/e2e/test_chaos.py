"""Every stream survives whatever happens to the services, and the suite would notice otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flyspec.client import Chat, GenerateOptions
from flyspec.rules import Rule
from flyspec.values.rounds import Outcome
from flyspec.word_problems import problems
from flyspec_lab.report import Results
from loadtest.chaos.faults import KINDS, OUTER
from loadtest.chaos.fleet import FleetOptions
from loadtest.chaos.replay import Replay
from loadtest.chaos.run import run
from loadtest.chaos.work import ChaosOptions, Request, TextJob


async def check(options, kinds=KINDS):
    result = await run(options)
    Results().finish(result.report())
    assert result.report().passed, result.violations
    assert result.completed_exact
    assert result.replayed_rounds
    assert {fault.kind for fault in result.faults} == set(kinds)
    return result


@pytest.mark.timeout(900)
@pytest.mark.parametrize("ill", [False, pytest.param(True, marks=pytest.mark.full)])
async def test_one_fault_of_each_kind(ill):
    fleet = FleetOptions(no_foreign=True, draft_timeout_s=1.0)
    options = ChaosOptions(
        seed=5, once=True, streams=8, texts=8, lossy_share=0.4, ill=ill, fleet=fleet
    )
    result = await check(options, KINDS if ill else OUTER)
    assert result.recoveries


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_five_minutes_of_random_faults():
    result = await check(ChaosOptions(seed=5))
    assert {"TARGET_REOPENED", "DRAFTER_FALLBACK", "DRAFTER_RESTORED"} <= set(result.recoveries)


RULES = (
    (Rule("fly"), 15),
    (Rule("margin", margin_threshold=1.0, fly_window_size=4), 4),
    (Rule("fly"), 0),
)


async def told(stack, rule, k):
    """A generation with its rounds, as one of the suite's requests."""
    (problem,) = problems("replay", 1)
    options = GenerateOptions(
        rule=rule, num_speculative_tokens=k, max_tokens=24, seed=1, return_rounds=True
    )
    prompt = Chat.of_user(problem.question)
    async with stack.client() as client:
        generation = await client.complete(prompt, options)
    return Request(1, TextJob(prompt, options), options, 0.0, generation=generation)


def changed(request, index, **fields):
    """The same with a falsified record."""
    generation = request.generation
    rounds = list(generation.rounds)
    rounds[index] = replace(rounds[index], **fields)
    return replace(request, generation=replace(generation, rounds=rounds))


async def test_a_replay_gives_the_same_and_finds_what_is_not(bundled_stack):
    with Replay("float64") as replay:
        for rule, k in RULES:
            request = await told(bundled_stack, rule, k)
            assert await replay.check(request) == ""
            generation = request.generation
            last = len(generation.rounds) - 1
            wrong = changed(request, last, next_token_id=generation.rounds[last].next_token_id ^ 1)
            assert "took" in await replay.check(wrong)
            fewer = replace(generation, rounds=generation.rounds[:-1])
            assert await replay.check(replace(request, generation=fewer))
            twice = replace(generation, rounds=[*generation.rounds, generation.rounds[-1]])
            assert await replay.check(replace(request, generation=twice))
            doubled = replace(generation, chunks=[*generation.chunks, generation.chunks[-1]])
            assert "tokens" in await replay.check(replace(request, generation=doubled))
            if k:
                assert await another_outcome_is_found(replay, request)


async def another_outcome_is_found(replay, request):
    """Whether an accepted draft that is reported as rejected is detected."""
    for index, record in enumerate(request.generation.rounds):
        if record.decisions and record.decisions[0].outcome is Outcome.EXACT:
            rejected = record.decisions[0]._replace(outcome=Outcome.REJECTED)
            other = changed(request, index, decisions=[rejected, *record.decisions[1:]])
            return "draft 0" in await replay.check(other)
    return False


async def test_what_a_request_must_not_do_is_noticed(stack):
    request = await told(stack, Rule("exact"), 15)
    generation = request.generation
    request.job.expected = generation
    assert request.problem == ""
    lost = replace(generation, chunks=generation.chunks[:-1])
    assert "tokens came" in replace(request, generation=lost).problem
    other = changed_token(generation)
    assert "differs from the fault-free" in replace(request, generation=other).problem
    assert "hangs" in replace(request, hung=True, ended_s=200.0).problem
    assert replace(request, generation=None, error="UnavailableError: no").problem


def changed_token(generation):
    first, *rest = generation.chunks
    return replace(
        generation,
        chunks=[replace(first, token_ids=[first.token_ids[0] ^ 1, *first.token_ids[1:]]), *rest],
    )
