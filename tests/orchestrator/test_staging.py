"""Staging changes no text; the trial that decides whether it pays; proposals that are pushed."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from itertools import cycle

import pytest

from flyspec.client import Completion, GenerateOptions
from flyspec.rules import Rule
from flyspec.values.rounds import DraftAdvance, DraftAhead, DraftChunk, DraftOpen
from flyspec.values.tokens import Origin, SamplingParams
from orchestrator.generation.loop_guard import LoopGuard
from orchestrator.generation.staging import FIRST_REST, TRIAL_ROUNDS, StagingTrial
from orchestrator.upstreams.proposal_checks import DrafterFaultError
from orchestrator.upstreams.pushed import PushedProposals
from tests.orchestrator.stacks import generate, orchestrator_over, start_stack
from verify_service.staging import StagedRounds

K = 4
PROMPTS = [[0, 17, 45, 120, 33], [0, 250, 91]]
RULES = [Rule("exact"), Rule("fly"), Rule("margin", margin_threshold=2.0), Rule("typical")]
SAMPLINGS = [SamplingParams(), SamplingParams(temperature=0.9)]


async def run(client, prompt, rule, sampling, **options):
    asked = GenerateOptions(
        rule=rule, num_speculative_tokens=K, max_tokens=30, sampling=sampling, seed=3, **options
    )
    tokens, completion = [], None
    async for event in client.generate(prompt, asked):
        tokens += getattr(event, "token_ids", ())
        if isinstance(event, Completion):
            completion = event
    return tokens, completion


def wait_for_staging(stack, monkeypatch):
    """Return an event; while it is set, rounds wait a little for another one to be staged."""
    patience, came = threading.Event(), threading.Event()
    stage, model = StagedRounds.stage, stack.verify_engine.model
    forward = model.forward

    def staging(self, waiting):
        came.set()
        return stage(self, waiting)

    def waiting(steps):
        if patience.is_set() and steps[0].num_logits == K + 1:
            came.wait(0.1)
            came.clear()
        return forward(steps)

    monkeypatch.setattr(StagedRounds, "stage", staging)
    model.forward = waiting
    return patience


@pytest.mark.parametrize("draft", [1, 0], ids=["other draft", "target drafts"])
async def test_texts_are_those_without_it(model_dirs, monkeypatch, draft):
    hits = rounds = 0
    async with (
        start_stack((model_dirs[0], model_dirs[draft]), staging="off") as stack,
        orchestrator_over(stack, staging="on") as (client, _),
    ):
        patience = wait_for_staging(stack, monkeypatch)
        for rule, sampling in zip(RULES, cycle(SAMPLINGS), strict=False):
            patience.clear()
            wanted, without = await run(stack.client, PROMPTS[0], rule, sampling)
            assert without.speculation.num_staging_rounds == 0
            patience.set()
            staged, completion = await run(client, PROMPTS[0], rule, sampling)
            assert staged == wanted, (rule, sampling)
            mine, theirs = completion.speculation, without.speculation
            hits += mine.num_staged_hits
            rounds += mine.num_staging_rounds
            assert mine.num_loose_tokens == theirs.num_loose_tokens
            assert mine.num_rollbacks == theirs.num_rollbacks
        assert await stack.idle()
    assert rounds
    assert hits or draft == 1


async def test_adaptive_texts_and_a_lost_target_are_no_matter(model_dirs):
    async with start_stack(model_dirs, staging="on") as stack:
        for prompt in PROMPTS:
            asked = GenerateOptions(rule=Rule("exact"), max_tokens=30)
            adaptive = await stack.client.complete(prompt, asked)
            wanted, _ = await run(stack.client, prompt, Rule("exact"), SamplingParams())
            assert adaptive.token_ids == wanted
            fixed = replace(asked, num_speculative_tokens=K)
            found, *_ = await generate(stack.client, prompt, fixed, stack.restart_verify)
            assert found == wanted


# --- whether it pays ------------------------------------------------------------------------


def ways(trial: StagingTrial, cost, rounds: int) -> list[bool]:
    found = []
    for _ in range(rounds):
        found.append(trial.stages)
        trial.ran(trial.stages, round(cost(trial.stages)))
    return found


@pytest.mark.parametrize("ratio", [0.6, 1.3])
def test_the_faster_way_is_chosen_and_the_other_tried_less_and_less(ratio):
    rng = random.Random(1)
    trial = StagingTrial()
    found = ways(trial, lambda on: 1e6 * (ratio if on else 1) * rng.uniform(0.8, 1.2), 4000)
    assert found[:TRIAL_ROUNDS] == [False] * TRIAL_ROUNDS
    assert found[TRIAL_ROUNDS : 2 * TRIAL_ROUNDS] == [True] * TRIAL_ROUNDS
    after = found[2 * TRIAL_ROUNDS :]
    assert after[:FIRST_REST] == [ratio < 1] * FIRST_REST
    assert sum(way is (ratio < 1) for way in after) > 0.95 * len(after)


def test_it_notices_that_things_have_changed():
    trial = StagingTrial()
    ways(trial, lambda on: 2e6 if on else 1e6, 1000)
    found = ways(trial, lambda on: 0.5e6 if on else 1e6, 4000)
    assert sum(found[-500:]) > 400


def test_rounds_that_could_not_be_staged_say_nothing():
    trial = StagingTrial()
    ways(trial, lambda on: 1e6, TRIAL_ROUNDS)
    for _ in range(100):
        trial.ran(False, 10**9)
    assert trial.stages
    assert StagingTrial(always=True).stages


# --- what is pushed --------------------------------------------------------------------------

OPEN = DraftOpen([1, 2, 3], SamplingParams(), 1, drafter_vocab_size=50)
REQUEST = DraftAdvance(4, 3, [9], 3, ahead=DraftAhead(2, 2))


def chunk(keep_length=5, next_token_id=7, start=None, ahead_id=1, **changes):
    values = {
        "round_id": 4, "token_ids": [5, 6], "ahead": True, "ahead_id": ahead_id,
        "start_position": keep_length + 1 if start is None else start, **changes,
    }  # fmt: skip
    values.setdefault("origins", [Origin.EXACT_MODEL] * len(values["token_ids"]))
    return DraftChunk(keep_length=keep_length, next_token_id=next_token_id, **values)


def test_pushed_proposals_by_what_they_build_on():
    pushed = PushedProposals(REQUEST, OPEN, 0)
    assert pushed.add(chunk(5, last=False, token_ids=[5]), 1) is None
    other = pushed.add(chunk(7, ahead_id=2), 1)
    whole = pushed.add(chunk(5, start=7, token_ids=[6]), 1)
    assert whole is not None
    assert whole.token_ids == [5, 6]
    assert pushed.complete == {1: whole, 2: other}
    assert pushed.following(5, 7) is whole
    assert pushed.following(5, 8) is None


def test_what_follows_a_confirmed_proposal_stays():
    pushed = PushedProposals(replace(REQUEST, ahead=DraftAhead(4, 2)), OPEN, 0)
    first = pushed.add(chunk(5), 1)
    pushed.add(chunk(6, ahead_id=2), 1)
    behind = pushed.add(chunk(8, ahead_id=3, follows_ahead_id=1), 1)
    pushed.add(chunk(8, ahead_id=4, follows_ahead_id=2), 1)
    confirm = DraftAdvance(9, 5, [7, *first.token_ids], 0, ahead=DraftAhead(4, 2, 2, 1))
    pushed.confirmed(confirm, 2)
    assert pushed.complete == {3: behind}
    assert pushed.following(8, 7) is behind
    # One on its way when the request was sent, and what is made for it.
    late, new = chunk(7, ahead_id=5, follows_ahead_id=1), chunk(6, ahead_id=7, follows_ahead_id=1)
    deeper = chunk(10, ahead_id=6, follows_ahead_id=3, round_id=9)
    for each in (late, replace(new, round_id=9), deeper):
        assert pushed.expects(each)
        assert pushed.add(each, 3) is not None
    assert not pushed.expects(chunk(8, ahead_id=8, follows_ahead_id=2))
    assert not pushed.expects(chunk(5, ahead_id=8))
    assert not pushed.expects(chunk(8, ahead_id=8, follows_ahead_id=1, round_id=8))


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (chunk(3), "follows 3 tokens, not 4 to 7"),
        (chunk(8), "follows 8 tokens, not 4 to 7"),
        (chunk(9, follows_ahead_id=2), "follows 9 tokens, not 6 to 8"),
        (chunk(token_ids=[5, 6, 7]), "3 tokens, 2 remaining"),
        (chunk(token_ids=[5, 50]), "token ID 50"),
        (chunk(start=9), "position 9 instead of 6"),
        (chunk(ahead_id=2), "a second proposal ahead with number 2"),
        (chunk(ahead_id=0), "a second proposal ahead with number 0"),
    ],
)
def test_lies_are_found(bad, said):
    pushed = PushedProposals(REQUEST, OPEN, 0)
    pushed.add(chunk(5, ahead_id=2), 1)
    with pytest.raises(DrafterFaultError, match=said):
        pushed.add(bad, 1)


def test_no_more_than_were_asked_for():
    pushed = PushedProposals(REQUEST, OPEN, 0)
    pushed.add(chunk(5), 1)
    pushed.add(chunk(6, ahead_id=2), 1)
    with pytest.raises(DrafterFaultError, match="more than 2 proposals ahead"):
        pushed.add(chunk(7, ahead_id=3), 1)


def test_the_loop_guard_looks_ahead_without_moving():
    guard = LoopGuard()
    for token in [1, 2, 3] * 15:
        guard.push(token)
    assert not guard.would_trigger([1, 2])
    assert guard.would_trigger([1, 2, 3])
    assert guard.num_tokens == 45
    assert guard.token_index is None
