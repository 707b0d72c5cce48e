"""Drafting early: while the target verifies, or reads the prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flyspec.rules import Rule
from flyspec.values.rounds import DistributionSpec, DraftChunk
from orchestrator.generation.following import Overtaken
from orchestrator.generation.pace import FixedPace
from orchestrator.generation.sources import AHEAD, AHEAD_MEMORY
from tests.orchestrator.fakes import Fakes, Offer, plan_of
from tests.orchestrator.test_drawn_drafts import ImpatientPace
from tests.orchestrator.tokenizer import TOKENIZER
from tests.orchestrator.world import GOOD, World, text_of

K = 6


def generation(world: World = GOOD, offer: Offer | None = None, pace=None, **changes) -> Fakes:
    plan = plan_of(**{"rule": Rule("exact"), "max_tokens": 80, **changes})
    offer = offer or Offer(1000)
    return Fakes(world, plan, TOKENIZER, window_size=0, offer=offer, pace=pace)


async def all_rounds(fakes: Fakes) -> list:
    """Its rounds; the text is that of plain decoding."""
    rounds, final = [], []
    async for round_, update in fakes.run():
        rounds.append(round_)
        final += [token.token_id for token in update.final]
    assert final == text_of(fakes.world, fakes.plan)
    return rounds


async def run(fakes: Fakes) -> list:
    """Its rounds with drafts."""
    return [round_ for round_ in await all_rounds(fakes) if round_.proposal.token_ids]


async def test_where_all_stands_nobody_waits_for_the_drafter() -> None:
    fakes = generation()
    rounds = await run(fakes)
    assert [r.proposal.ahead for r in rounds] == [False] + [True] * (len(rounds) - 1)
    assert [len(r.proposal.token_ids) for r in rounds[:-1]] == [3] + [4] * (len(rounds) - 2)
    # Every proposal was requested once, the first one with the prompt, which has one token left.
    asked = [len(tokens) for tokens in fakes.draft.sequences.values()]
    assert asked == [3, *(r.start + len(r.proposal.token_ids) for r in rounds[:-1])]
    assert fakes.draft.opened == 1


async def test_what_was_drafted_in_vain_is_not_asked_for_again_and_again() -> None:
    world = replace(GOOD, agreement=0.2)
    fakes = generation(world)
    rounds = await run(fakes)
    assert not any(r.proposal.ahead for r in rounds[1:3])
    in_vain = len(fakes.draft.sequences) - len(rounds)
    value, most = 1.0, 0
    while value >= AHEAD:
        value, most = value * AHEAD_MEMORY, most + 1
    assert in_vain <= most + sum(r.verdict.num_accepted == 4 for r in rounds)


@pytest.mark.parametrize("agreement", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("delay", [0, 7])
async def test_a_wrong_guess_changes_nothing(agreement: float, delay: int) -> None:
    fakes = generation(replace(GOOD, agreement=agreement), Offer(1000, delay))
    rounds = await run(fakes)
    for round_ in rounds:  # a proposal is what the drafter says there, asked ahead or not
        prefix = fakes.verify.sequences[round_.request.round_id]
        for token in round_.proposal.token_ids:
            assert token == fakes.world.guess(prefix)
            prefix = [*prefix, token]


def test_what_plain_decoding_overtook_is_not_ahead_of_it() -> None:
    overtaken = Overtaken(DraftChunk(token_ids=[4, 5, 6], origins=[1] * 3, ahead=True), 1, 1, 0)
    rest = overtaken.rest(4)
    assert (list(rest.token_ids), rest.ahead) == ([5, 6], False)


@pytest.mark.parametrize("kind", ["write", "read"])
async def test_a_drafter_lost_meanwhile_is_opened_again(kind: str) -> None:
    fakes = generation()
    running = fakes.run()
    for _ in range(3):
        await anext(running)
    fakes.draft.break_at(kind)
    final = [t.token_id async for _, update in running for t in update.final]
    assert final == text_of(GOOD, fakes.plan)[-len(final) :]
    assert fakes.draft.opened == 2
    assert [r.kind.name for r in fakes.ledger.recoveries.kept] == ["DRAFTER_REOPENED"]


async def test_distributions_come_along() -> None:
    fakes = generation(distribution=DistributionSpec(top_k=1))
    rounds = await run(fakes)
    assert sum(r.proposal.ahead for r in rounds) > 10
    for round_ in rounds:
        tokens = [token for (token,) in (d.token_ids for d in round_.proposal.distributions)]
        assert tokens == list(round_.proposal.token_ids)


async def test_a_drafter_with_a_limit_is_not_asked_for_more() -> None:
    fakes = generation()
    (replica,) = fakes.drafters.active.replicas
    replica.info.max_speculative_tokens, before = 4, replica.info.max_speculative_tokens
    try:
        rounds = await run(fakes)
    finally:
        replica.info.max_speculative_tokens = before
    assert not any(r.proposal.ahead for r in rounds)


# --- beside the prompt ----------------------------------------------------------------------


def beside(agreement: float, delay: int, pace=None) -> Fakes:
    world, changes = replace(GOOD, agreement=agreement), {"max_tokens": 40, "adaptive": True}
    changes["num_speculative_tokens"] = K
    return generation(world, Offer(1000, delay), pace or FixedPace(K), **changes)


@pytest.mark.parametrize("delay", [0, 3, 20])
@pytest.mark.parametrize(("agreement", "length", "ahead"), [(1.0, K - 1, K - 1), (0.0, K, 0)])
async def test_only_behind_another_token_the_drafter_is_asked_again(
    delay, agreement, length, ahead
) -> None:
    fakes = beside(agreement, delay)
    first, second, *_ = await all_rounds(fakes)
    if agreement:
        assert not first.proposal.token_ids
    assert second.start == first.start + 1
    assert len(second.proposal.token_ids) == length
    asked = [len(tokens) for tokens in fakes.draft.sequences.values()]
    assert asked[:2] == [first.start, second.start + ahead], "the next one is drafted ahead"


async def test_a_late_one_is_not_waited_for() -> None:
    rounds = await all_rounds(beside(1.0, 60, ImpatientPace()))
    assert not any(round_.proposal.token_ids for round_ in rounds[:2])
