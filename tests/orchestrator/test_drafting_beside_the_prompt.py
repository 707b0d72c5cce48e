"""Drafting from a text's second token on: drafter and target read the prompt at the same time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flyspec.rules import Rule
from orchestrator.generation.pace import FixedPace, NextRound
from tests.orchestrator.fakes import Fakes, Offer, plan_of
from tests.orchestrator.tokenizer import TOKENIZER
from tests.orchestrator.world import GOOD, text_of

K = 6


class ImpatientPace(FixedPace):
    """Waits for no proposal."""

    def turn(self) -> NextRound:
        return super().turn()._replace(patience_ns=0)


async def run(agreement: float, delay: int, pace: FixedPace | None = None):
    """Its rounds with drafts, and the fakes; the text is that of plain decoding."""
    world = replace(GOOD, agreement=agreement)
    plan = plan_of(rule=Rule("exact"), max_tokens=40, num_speculative_tokens=K, adaptive=True)
    pace = pace or FixedPace(K)
    fakes = Fakes(world, plan, TOKENIZER, window_size=0, pace=pace, offer=Offer(1000, delay))
    rounds, final = [], []
    async for round_, update in fakes.run():
        rounds.append(round_)
        final += [token.token_id for token in update.final]
    assert final == text_of(world, plan)
    return fakes, rounds


@pytest.mark.parametrize("delay", [0, 3, 20])
async def test_what_the_text_agrees_with_is_checked_without_another_question(delay) -> None:
    fakes, rounds = await run(1.0, delay)
    first, second = rounds[:2]
    assert not first.proposal.token_ids
    assert second.start == first.start + 1
    assert len(second.proposal.token_ids) == K - 1
    asked = [len(tokens) for tokens in fakes.draft.sequences.values()]
    assert asked[:2] == [first.start, second.start + K - 1], "the next one is drafted ahead"


@pytest.mark.parametrize("delay", [0, 3, 20])
async def test_behind_another_token_the_drafter_is_asked_again(delay) -> None:
    fakes, rounds = await run(0.0, delay)
    first, second = rounds[:2]
    assert second.start == first.start + 1
    assert len(second.proposal.token_ids) == K
    asked = [len(tokens) for tokens in fakes.draft.sequences.values()]
    assert asked[:2] == [first.start, second.start]


async def test_a_late_one_is_not_waited_for() -> None:
    _, rounds = await run(1.0, 60, ImpatientPace(K))
    assert not any(round_.proposal.token_ids for round_ in rounds[:2])
