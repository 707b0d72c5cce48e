"""Drafting from a text's second token on: drafter and target read the prompt at the same time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flyspec.rules import Rule
from orchestrator.generation.pace import CheckedRound, FixedPace, NextRound
from tests.orchestrator.fakes import Fakes, Offer, plan_of
from tests.orchestrator.tokenizer import TOKENIZER
from tests.orchestrator.world import GOOD, text_of

K = 6


class FromTheSecondToken(FixedPace):
    """One plain token, then K drafts per round; the drafter is queried with the prompt."""

    def __init__(self, patience_ns: int | None = None) -> None:
        super().__init__(0)
        self._patience_ns = patience_ns
        self._turn = NextRound(0, max_plain_tokens=1)

    def checked(self, round_: CheckedRound) -> None:
        self._turn = NextRound(K, patience_ns=self._patience_ns)

    def follows(self, num_tokens: int) -> int:
        return 0 if self._turn.num_drafts else K


async def run(agreement: float, delay: int, patience_ns: int | None = None):
    """Its rounds with drafts, and the fakes; the text is that of plain decoding."""
    world = replace(GOOD, agreement=agreement)
    plan = plan_of(rule=Rule("exact"), max_tokens=40, num_speculative_tokens=K, adaptive=True)
    pace = FromTheSecondToken(patience_ns)
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
    assert asked[:2] == [first.start, second.start + K]


@pytest.mark.parametrize("delay", [0, 3, 20])
async def test_behind_another_token_the_drafter_is_asked_again(delay) -> None:
    fakes, rounds = await run(0.0, delay)
    first, second = rounds[:2]
    assert second.start == first.start + 1
    assert len(second.proposal.token_ids) == K
    asked = [len(tokens) for tokens in fakes.draft.sequences.values()]
    assert asked[:2] == [first.start, second.start]


async def test_a_late_one_is_not_waited_for() -> None:
    _, rounds = await run(1.0, 60, patience_ns=0)
    assert not any(round_.proposal.token_ids for round_ in rounds[:2])
