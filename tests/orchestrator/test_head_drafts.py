"""The proposals of a target's head that come with verdicts."""

from __future__ import annotations

from flyspec.values.requests import SamplingParams
from flyspec.values.rounds import (
    DraftOpen,
    HeadProposal,
    HeadRequest,
    Verdict,
    VerifyTimings,
)
from orchestrator.generation.head_drafts import HeadDrafts

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
        of_round = found.take(TOKENS, 8)
        found.received(REQUEST, told)
        following = found.take(TOKENS, 8)
        assert checked is None
        assert following is not None
        assert (of_round is not None) == (drafts > 0)
        assert following.timings.model_ns == following.timings.service_ns == times[1]
        assert (of_round.timings.model_ns if of_round else 0) == times[0]


def test_a_verdict_without_the_requested_proposal_is_a_miss():
    found = heads()
    for number in range(1, 4):
        found.received(REQUEST, verdict(0))
        assert found.misses == number
        assert found.take(TOKENS, 8) is None
    found.received(REQUEST, verdict(3))
    assert found.misses == 0
    proposal = found.take(TOKENS, 2)
    assert proposal is not None
    assert proposal.token_ids == [7, 7]
    found.received(REQUEST, verdict(3))
    found.keep(2)
    assert found.take(TOKENS, 8) is None, "something else follows"
