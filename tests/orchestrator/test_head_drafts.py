"""Proposals of a target's head: their share of its time, and where a relay hands over."""

from __future__ import annotations

import pytest

from flyspec.values.requests import SamplingParams
from flyspec.values.rounds import (
    DraftChunk,
    DraftOpen,
    HeadProposal,
    HeadRequest,
    Verdict,
    VerifyTimings,
)
from flyspec.values.tokens import Origin
from orchestrator.generation.head_drafts import MAX_BLOCK, Handover, HeadDrafts

REQUEST = HeadRequest("head", 8)
TOKENS = [1, 2, 3]


def heads() -> HeadDrafts:
    return HeadDrafts(DraftOpen(TOKENS, SamplingParams(), 0, drafter_vocab_size=50))


def verdict(proposal: int, drafts: int = 0) -> Verdict:
    """Return a verdict behind `TOKENS` with so many proposed tokens, after 800 ns of the head."""
    proposals = [HeadProposal((7,) * n, (0.5,) * n) if n else None for n in (proposal, drafts)]
    timings = VerifyTimings(head_ns=800)
    return Verdict(2, 3, last=True, proposal=proposals[0], drafts=proposals[1], timings=timings)


def test_two_proposals_of_one_verdict_share_the_heads_time():
    """As behind the last of several rounds that a head went on with."""
    for drafts, times in ((0, (0, 800)), (8, (400, 400)), (2, (160, 640))):
        found, told = heads(), verdict(8, drafts)
        checked = found.went_on(TOKENS, REQUEST, told) if drafts else None
        of_round = found.proposal_for(TOKENS, 8)
        found.received(REQUEST, told)
        following = found.proposal_for(TOKENS, 8)
        assert checked is None
        assert following is not None
        assert (of_round is not None) == (drafts > 0)
        assert following.timings.model_ns == following.timings.service_ns == times[1]
        assert (of_round.timings.model_ns if of_round else 0) == times[0]


def block(confidences, start=10):
    tokens = list(range(100, 100 + len(confidences)))
    origins = [Origin.EXACT_MODEL] * len(tokens)
    return DraftChunk(
        start_position=start, token_ids=tokens, origins=origins, confidences=confidences
    )


def length(handover, *confidences):
    return len(handover.kept(block(confidences)).token_ids)


def test_the_head_goes_on_while_it_is_sure():
    handover = Handover()
    assert length(handover, 0.9, 0.8, 0.79, 0.9) == 2
    assert length(handover, 0.4, 0.9) == 0
    assert length(handover, *[1.0] * 9) == MAX_BLOCK
    assert length(handover) == 0


def hand_over(handover, confidence, of_service, follows):
    """Hand over at a second token, and let the text go on with these tokens behind position 10."""
    whole = block([0.95, confidence])
    kept = handover.kept(whole)
    assert len(kept.token_ids) == 1
    handover.handed(whole, kept, of_service)
    handover.learn([*range(10), *follows])


def test_the_head_goes_on_where_it_has_been_right_more_often():
    handover = Handover()
    hand_over(handover, 0.6, 7, [100, 101])  # the head's token was right
    assert length(handover, 0.6, 0.79) == 2
    assert length(handover, 0.6, 0.49) == 1  # a class of its own
    hand_over(handover, 0.3, 7, [100, 7])
    hand_over(handover, 0.3, 7, [100, 101])
    assert length(handover, 0.3) == 0
    hand_over(handover, 0.3, 7, [100, 101])
    assert length(handover, 0.3) == 1


@pytest.mark.parametrize(
    ("of_service", "follows"),
    [
        (7, [99, 101]),  # an earlier token was rejected
        (7, [100]),  # the sequence ends before the place
        (101, [100, 101]),  # both had the same token
        (7, [100, 5]),  # neither was right
    ],
)
def test_nothing_is_learnt_where_neither_was_better(of_service, follows):
    handover = Handover()
    hand_over(handover, 0.6, of_service, follows)
    assert length(handover, 0.6) == 0
