"""The proposals of a target's head, which come with the verdicts before them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from flyspec.values.rounds import (
    DraftAdvance,
    DraftChunk,
    DraftOpen,
    DraftTimings,
    HeadProposal,
    HeadRequest,
    StagedOn,
    Verdict,
)
from flyspec.values.tokens import Origin
from orchestrator.upstreams.proposal_checks import Answer

MAX_MISSES = 3
"""Consecutive verdicts without the requested proposal after which a generation does without."""


class HeadDrafts:
    """The latest proposal, until the sequence is not the one that it follows.

    `open_` is the generation's draft session, whose distributions and vocabulary a proposal has.
    `misses` counts consecutive verdicts without a requested proposal.
    """

    def __init__(self, open_: DraftOpen) -> None:
        self._open = open_
        self._proposal: DraftChunk | None = None
        self.name = ""
        """The head that the proposal is of."""
        self.misses = 0

    def received(self, request: HeadRequest | None, verdict: Verdict) -> None:
        """Take the proposal of a verdict. Raises `DrafterFaultError` if it is invalid."""
        self._proposal = None
        if request is None or not request.max_tokens or not verdict.last:
            return
        if verdict.proposal is None:
            self.misses += not (verdict.failed or verdict.started_staged_round_id)
            return
        place = StagedOn(verdict.round_id, verdict.keep_length, verdict.next_token_id)
        self._take(request, place, verdict.proposal, _time_of(verdict.proposal, verdict))

    def went_on(self, tokens: Sequence[int], request: HeadRequest, verdict: Verdict) -> None:
        """Take the drafts of a round that the head went on with, which follow `tokens`.

        Raises `DrafterFaultError` if they are invalid.
        """
        self._proposal = None
        if verdict.drafts is None or not verdict.drafts.token_ids:
            self.misses += 1
        else:
            place = StagedOn(verdict.round_id, len(tokens) - 1, tokens[-1])
            self._take(request, place, verdict.drafts, _time_of(verdict.drafts, verdict))

    def _take(
        self, request: HeadRequest, place: StagedOn, proposal: HeadProposal, head_ns: int
    ) -> None:
        """Take a proposal that passes the checks of a draft service's."""
        round_id, keep, following = place
        now = time.perf_counter_ns()
        asked = DraftAdvance(round_id, keep, (following,), request.max_tokens)
        answer = Answer(asked, self._open, following, now)
        chunk = DraftChunk(
            round_id, keep, following, keep + 1, list(proposal.token_ids),
            [Origin.EXACT_MODEL] * len(proposal.token_ids),
            distributions=proposal.distributions, confidences=proposal.confidences,
        )  # fmt: skip
        answer.add(chunk, now)
        self.name, self.misses = request.name, 0
        timings = DraftTimings(model_ns=head_ns, service_ns=head_ns)
        self._proposal = replace(answer.proposal, timings=timings)

    def take(self, tokens: Sequence[int], max_tokens: int) -> DraftChunk | None:
        """Return the proposal that follows `tokens`, up to `max_tokens` of it; None without one."""
        proposal, self._proposal = self._proposal, None
        if proposal is None or proposal.start_position != len(tokens):
            return None
        if tokens[-1] != proposal.next_token_id:
            return None
        return proposal.cut(0, max_tokens)

    def keep(self, length: int) -> None:
        """Record that the sequence was truncated to `length` tokens, whatever follows now."""
        if self._proposal is not None and length < self._proposal.start_position:
            self._proposal = None


def _time_of(proposal: HeadProposal, verdict: Verdict) -> int:
    """Return a proposal's share of the head's time, in ns.

    A round that the head went on with may have two: its own drafts, and the next round's.
    """
    both = [each for each in (verdict.drafts, verdict.proposal) if each is not None]
    count = sum(len(each.token_ids) for each in both)
    return verdict.timings.head_ns * len(proposal.token_ids) // max(1, count)


def joined(block: DraftChunk, extension: DraftChunk) -> DraftChunk:
    """Return a head's block and what another drafter proposes behind it, as one proposal.

    If that one knows no confidences, those of the block's tokens remain.
    """
    both = block.joined(extension)
    one, other = block.timings, extension.timings
    timings = DraftTimings(
        one.queue_ns + other.queue_ns,
        one.model_ns + other.model_ns,
        one.service_ns + other.service_ns,
    )
    if len(block.confidences) != len(block.token_ids):
        both = replace(both, confidences=())
    return replace(both, timings=timings, agreements=())
