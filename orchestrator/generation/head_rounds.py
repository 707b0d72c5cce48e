"""Heads of the target: their proposals come with verdicts, and they go on with rounds themselves.

Such rounds (`flyspec.self_drafting`) change no text: each is the one that would be sent. So they
are allowed where a round's request follows from the one before it, and a verdict on another round
than would be sent now is dropped.
"""

from __future__ import annotations

import time
from dataclasses import replace

from flyspec.self_drafting import following_round
from flyspec.values.rounds import DraftChunk, Verdict, VerifyRound
from orchestrator.generation.progress import CurrentRound, Progress
from orchestrator.generation.sources import Source

MAX_ROUNDS = 16
"""Maximum rounds in a row: leaving a replica that drains waits for them."""
MAX_ADAPTIVE_ROUNDS = 4
"""The same where K adapts: it stays as it is meanwhile, unless drafting ends."""


class HeadRounds(Source):
    """The rounds of one generation that a head goes on with; its drafts come with their verdict.

    `_begun` is the one that the target has begun.
    """

    keeps = False

    def __init__(self, progress: Progress) -> None:
        self._progress, plan = progress, progress.plan
        self._may = not (
            plan.judging.phases
            or plan.drafts.prediction
            or plan.judging.has_budget
            or plan.drafts.distribution
        )
        self._begun: VerifyRound | None = None

    def allow(self, request: VerifyRound) -> VerifyRound:
        """Return a round's request that allows further rounds, where they would be alike."""
        progress, head = self._progress, request.head
        if head is None:
            return request
        alike = progress.pace.lets_go_on and not progress.drafting.relays
        if self._may and alike and head.max_tokens and request.max_plain_tokens <= 1:
            context = progress.plan.limits.context_length - len(progress.sequence)
            most = MAX_ADAPTIVE_ROUNDS if progress.plan.drafts.adaptive else MAX_ROUNDS
            count = min(most, num_uncut(request, min(progress.remaining, context)))
            head = head._replace(num_rounds=count)
            request = replace(request, head=head)
        progress.reserve(request.round_id + head.num_rounds)
        return request

    def continues(self, request: VerifyRound, verdict: Verdict) -> bool:
        """True if the head goes on with the next round, and is still to be the drafter."""
        progress, head = self._progress, request.head
        self._begun = None
        if not (head and head.num_rounds and verdict.last):
            return False
        went_on = verdict.started_staged_round_id == request.round_id + 1
        if went_on and progress.pace.turn().num_drafts and progress.drafting.still_heads(head):
            self._begun = following_round(request, verdict)
        return self._begun is not None

    def begin(self, round_: CurrentRound) -> bool:
        if self._begun is not None:
            round_.head_query = 0
        return self._begun is not None

    async def proposal(self, round_: CurrentRound) -> DraftChunk | None:
        """Return the drafts, with their request and verdict, for the round is `self_started`."""
        progress, begun = self._progress, self._begun
        assert begun is not None
        assert begun.head is not None
        since_ns = time.perf_counter_ns()
        verdict = await progress.verifying.verdict_of(begun.round_id)
        round_.waiting_ns = time.perf_counter_ns() - since_ns
        if verdict is not None:
            proposal = progress.drafting.went_on(progress.sequence.tokens, begun.head, verdict)
            wanted = max(round_.turn.num_drafts, begun.head.max_tokens)
            if proposal is not None and len(proposal.token_ids) <= progress.draft_limit(0, wanted):
                own = self._as_begun(begun, progress.request(round_, proposal))
                if own is not None:
                    round_.self_started = own, verdict
                    return proposal
        # The target was lost, or another round has to be sent by now.
        self._begun = None
        progress.verifying.keep(len(progress.sequence))
        return None

    def _as_begun(self, begun: VerifyRound, request: VerifyRound) -> VerifyRound | None:
        """Return the request of the round that has begun, given the one that would be sent.

        None if that is another round.
        """
        if begun.head is None or request.head is None:
            return None
        asked = begun.head
        head = request.head._replace(num_rounds=asked.num_rounds)
        if self._progress.plan.drafts.adaptive:
            head = head._replace(max_tokens=asked.max_tokens, min_confidence=asked.min_confidence)
        own = replace(
            request, round_id=begun.round_id, keep_length=begun.keep_length, draft_survivals=(),
            head=head,
        )  # fmt: skip
        return own if replace(own, draft_token_ids=()) == begun else None


def num_uncut(request: VerifyRound, room: int) -> int:
    """Return how many further rounds no limit can cut short: `room` more tokens are to come."""
    assert request.head is not None
    room -= len(request.draft_token_ids) + 1
    return max(0, (room - 1) // (request.head.max_tokens + 1))
