"""The rounds that a head of the target goes on with by itself (`flyspec.self_drafting`).

They change no text: each is the one that would be sent. So they are allowed where a round's request
follows from the one before it, and a verdict on another round than would be sent now is dropped.
"""

from __future__ import annotations

from dataclasses import replace

from flyspec.self_drafting import following_round
from flyspec.values.rounds import Verdict, VerifyRound
from orchestrator.generation.plan import GenerationPlan

MAX_ROUNDS = 16
"""Maximum rounds in a row: leaving a replica that drains waits for them."""
MAX_ADAPTIVE_ROUNDS = 4
"""The same where K adapts: it stays as it is meanwhile, unless drafting ends."""


class HeadRounds:
    """Which rounds of one generation its head goes on with; none if it `may` not.

    `begun` is the one that the target has begun, without its drafts, which come with its verdict.
    """

    def __init__(self, plan: GenerationPlan, may: bool) -> None:
        self._may = may and not (plan.has_budget or plan.distribution)
        self._adapts = plan.adaptive
        self.begun: VerifyRound | None = None

    def allow(self, request: VerifyRound, room: int) -> VerifyRound:
        """Return a round's request that allows further rounds.

        That is as many as no limit can cut short: `room` more tokens are wanted, and fit.
        """
        head = request.head
        if not self._may or head is None or not head.max_tokens:
            return request
        if request.max_plain_tokens > 1:
            return request
        room -= len(request.draft_token_ids) + 1
        most = MAX_ADAPTIVE_ROUNDS if self._adapts else MAX_ROUNDS
        count = min(most, (room - 1) // (head.max_tokens + 1))
        return replace(request, head=head._replace(num_rounds=max(0, count)))

    def heard(self, request: VerifyRound, verdict: Verdict) -> VerifyRound | None:
        """Note which round the head goes on with after a verdict; return that."""
        going_on = bool(request.head and request.head.num_rounds and verdict.last)
        self.begun = None
        if going_on and verdict.started_staged_round_id == request.round_id + 1:
            self.begun = following_round(request, verdict)
        return self.begun

    def as_begun(self, request: VerifyRound) -> VerifyRound | None:
        """Return the request of the round that has begun, given the one that would be sent.

        None if that is another round.
        """
        begun, head = self.begun, request.head
        if begun is None or begun.head is None or head is None:
            return None
        head = head._replace(num_rounds=begun.head.num_rounds)
        if self._adapts:
            asked = begun.head
            head = head._replace(max_tokens=asked.max_tokens, min_confidence=asked.min_confidence)
        own = replace(
            request, round_id=begun.round_id, keep_length=begun.keep_length, draft_survivals=(),
            head=head,
        )  # fmt: skip
        return own if replace(own, draft_token_ids=()) == begun else None
