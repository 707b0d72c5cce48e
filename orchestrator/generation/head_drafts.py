"""The proposals of a target's head, which come with the verdicts before them, and relays of them.

A head feeds on its own rows and gets worse with every token, and even before that the draft service
that goes on behind it in a relay may know better. Where both know better now and then, the relay
accepts more tokens than either; which one does at a place where the head is unsure, a sequence
shows soon.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

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
MAX_BLOCK = 5
"""Most tokens of a head that a draft service extends: heads are trained on 3 to 8 steps."""
_CONFIDENCES = (0.5, 0.8)
"""Classes of the head's tokens, by its confidence. Those of the last one always stand."""


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

    def proposal_for(self, tokens: Sequence[int], max_tokens: int) -> DraftChunk | None:
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


class _Place(NamedTuple):
    """A place at which the head handed over: what comes before, and what was guessed there."""

    start: int
    before: Sequence[int]
    kind: int
    of_head: int
    of_service: int


class Handover:
    """Whose token to draft where the head is unsure, in one sequence.

    That of the draft service, until the head's own would have been right more often in such places.
    """

    def __init__(self) -> None:
        self._ahead = [0] * len(_CONFIDENCES)  # by class: right tokens of the head, less the other
        self._place: _Place | None = None

    def kept(self, block: DraftChunk) -> DraftChunk:
        """Return the part of a head's block behind which the draft service is to go on."""
        for at, confidence in enumerate(block.confidences[:MAX_BLOCK]):
            kind = _kind(confidence)
            if kind < len(self._ahead) and self._ahead[kind] <= 0:
                return block.cut(0, at)
        return block.cut(0, MAX_BLOCK)

    def handed(self, block: DraftChunk, kept: DraftChunk, token_id: int) -> None:
        """Note what the draft service has at the place of the head's first token that is left out.

        `learn` compares both with the text.
        """
        at, self._place = len(kept.token_ids), None
        if at < len(block.token_ids) and (own := block.token_ids[at]) != token_id:
            kind = _kind(block.confidences[at])
            if kind < len(self._ahead):
                self._place = _Place(block.start_position, kept.token_ids, kind, own, token_id)

    def learn(self, tokens: Sequence[int]) -> None:
        """Learn from how the sequence went on, if it did as far as the last place."""
        place, self._place = self._place, None
        if place is None:
            return
        end = place.start + len(place.before)
        if len(tokens) > end and list(tokens[place.start : end]) == list(place.before):
            right = tokens[end]
            self._ahead[place.kind] += (right == place.of_head) - (right == place.of_service)


def _kind(confidence: float) -> int:
    return bisect_right(_CONFIDENCES, confidence)
