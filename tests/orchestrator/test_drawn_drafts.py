"""Drafts that are drawn, and judged at random: none is dropped for what it is, or for being late.

How long a proposal takes depends on what is drawn, since it ends at an end of sequence and where
the drafter is unsure.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from flyspec.rules import Rule
from flyspec.values.rounds import DistributionSpec, DraftChunk
from flyspec.values.tokens import Origin
from orchestrator.generation.following import Overtaken
from orchestrator.generation.head_drafts import joined
from orchestrator.generation.pace import CheckedRound, FirstToken, FixedPace, NextRound, Pace
from orchestrator.pace.policy import AdaptivePace, Experience
from tests.orchestrator.fakes import Fakes, Offer, plan_of
from tests.orchestrator.tokenizer import TOKENIZER
from tests.orchestrator.world import GOOD

K = 6
ALWAYS_RIGHT = replace(GOOD, agreement=1.0)


class ImpatientPace(FixedPace):
    """Waits for no proposal. `heard` are those made alongside plain decoding."""

    def __init__(self) -> None:
        super().__init__(K)
        self.heard: list[Overtaken] = []

    def turn(self) -> NextRound:
        return super().turn()._replace(patience_ns=0)

    def followed(self, overtaken: Overtaken) -> None:
        self.heard.append(overtaken)


class FollowingPace(Pace):
    """Decodes plainly until the drafter has been heard once, then drafts."""

    def __init__(self) -> None:
        self.heard: list[Overtaken] = []
        self._begun = False

    def turn(self) -> NextRound:
        return NextRound(K if self.heard else 0)

    def checked(self, round_: CheckedRound) -> None:
        self._begun = True

    def follows(self) -> int:
        return K if self._begun and not self.heard else 0

    def followed(self, overtaken: Overtaken) -> None:
        self.heard.append(overtaken)


async def run(pace: Pace, delay: int, draws: bool):
    """Its rounds with drafts."""
    plan = plan_of(
        rule=Rule("rejection"), max_tokens=60, num_speculative_tokens=K, max_plain_tokens=1,
        distribution=DistributionSpec(draw_from_it=True) if draws else None,
    )  # fmt: skip
    offer = Offer(1000, delay, confidences=True)
    fakes = Fakes(ALWAYS_RIGHT, plan, TOKENIZER, window_size=0, pace=pace, offer=offer)
    return [round_ async for round_, _ in fakes.run() if round_.proposal.token_ids]


@pytest.mark.parametrize("delay", [0, 60])
async def test_they_are_waited_for(delay: int) -> None:
    drafted = await run(ImpatientPace(), delay, draws=True)
    assert drafted[0].start == 4, "the round after the first token"
    others = await run(ImpatientPace(), delay, draws=False)
    assert not others or others[0].start > 4


async def test_beside_the_prompt_the_pace_hears_only_of_what_the_text_has_passed() -> None:
    pace = ImpatientPace()
    await run(pace, 3, draws=True)
    assert pace.heard[0].num_behind == 1
    assert len(pace.heard[0].proposal.confidences) == 1


@pytest.mark.parametrize("delay", [0, 3, 60])
async def test_what_follows_plain_decoding_is_heard_of_once_the_text_has_passed_it(delay) -> None:
    pace = FollowingPace()
    drafted = await run(pace, delay, draws=True)
    assert pace.heard[0].num_behind >= K
    assert len(drafted[0].proposal.token_ids) == K, "no rest, but drafted anew"
    if not delay:
        others = await run(other := FollowingPace(), delay, draws=False)
        assert other.heard[0].num_behind < K
        assert 0 < len(others[0].proposal.token_ids) < K


@pytest.mark.parametrize("num_looked_up", [0, 1, 3])
def test_in_a_relay_what_comes_behind_says_nothing_of_the_block(num_looked_up: int) -> None:
    """Prompt lookup, which knows no confidences, goes on behind a head."""
    text = AdaptivePace(Experience(), plan_of(rule=Rule("rejection")), "relay", FirstToken(0.1, 5))
    block = DraftChunk(token_ids=[5, 6], origins=[Origin.EXACT_MODEL] * 2, confidences=[0.5, 0.25])
    behind = DraftChunk(
        token_ids=[7] * num_looked_up, origins=[Origin.EXACT_LOOKUP] * num_looked_up
    )
    survivals = text.survivals(joined(block, behind))
    assert list(survivals[:2]) == list(text.survivals(block))
    assert len(survivals) == 2 + num_looked_up
    assert all(0 <= b <= a for a, b in pairwise(survivals))
