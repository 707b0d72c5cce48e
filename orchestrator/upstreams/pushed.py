"""Proposals that a drafter makes ahead of a verdict (`DraftAdvance.ahead`), as they arrive."""

from __future__ import annotations

from dataclasses import replace

from flyspec.values.rounds import DraftAdvance, DraftChunk, DraftOpen
from orchestrator.upstreams.proposal_checks import Answer, DraftFault


class PushedProposals:
    """The proposals made ahead that a request, sent at `sent_ns`, asked for.

    `complete` has those that arrived, by the `keep_length` and `next_token_id` that they build on.
    """

    def __init__(self, request: DraftAdvance, open_: DraftOpen, sent_ns: int) -> None:
        assert request.ahead is not None
        self._request, self._open, self._sent_ns = request, open_, sent_ns
        self._ahead = request.ahead
        appended = len(request.append_token_ids) - self._ahead.num_unverified
        self._first = request.keep_length + appended
        self._last = self._first + (self._ahead.num_unverified or request.max_tokens)
        self._making: dict[tuple[int, int], Answer] = {}
        self.complete: dict[tuple[int, int], DraftChunk] = {}
        self.max_bytes = self._answer(self._first, 0).max_bytes

    @property
    def round_id(self) -> int:
        return self._request.round_id

    def add(self, chunk: DraftChunk, now_ns: int) -> DraftChunk | None:
        """Add a chunk; return its proposal once it is complete. Raises `DrafterFaultError`."""
        on = chunk.keep_length, chunk.next_token_id
        answer = self._making.setdefault(on, self._answer(*on))
        is_more = on in self.complete or len(self._making) > self._ahead.num_proposals
        if not self._first <= chunk.keep_length <= self._last:
            answer.refuse(
                DraftFault.POSITION,
                f"a proposal ahead that follows {chunk.keep_length} tokens, not {self._first} to "
                f"{self._last}",
            )
        if is_more:
            answer.refuse(
                DraftFault.ROUND, f"more than {self._ahead.num_proposals} proposals ahead"
            )
        answer.add(chunk, now_ns)
        if not answer.complete:
            return None
        self.complete[on] = proposal = replace(
            answer.proposal, keep_length=on[0], next_token_id=on[1], ahead=True
        )
        return proposal

    def _answer(self, keep_length: int, next_token_id: int) -> Answer:
        request = replace(
            self._request,
            keep_length=keep_length,
            append_token_ids=(next_token_id,),
            max_tokens=self._ahead.max_tokens,
            score=False,
        )
        return Answer(request, self._open, next_token_id, self._sent_ns)
