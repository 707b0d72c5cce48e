"""Proposals that a drafter makes ahead of verdicts (`DraftAdvance.ahead`), as they arrive.

They are a tree: each follows the proposal that is being verified, or one that is there already.
"""

from __future__ import annotations

from dataclasses import replace

from flyspec.draft_trees import behind
from flyspec.values.rounds import DraftAdvance, DraftChunk, DraftOpen
from orchestrator.upstreams.proposal_checks import Answer, DraftFault


class PushedProposals:
    """The proposals made ahead since a request, sent at `sent_ns`, and after all of one of them has
    been `confirmed`, what follows that.

    `complete` has those that arrived, by `ahead_id`.
    """

    def __init__(self, request: DraftAdvance, open_: DraftOpen, sent_ns: int) -> None:
        ahead = request.ahead
        assert ahead is not None
        self._open = open_
        self._asked = {request.round_id: (request, ahead, sent_ns)}
        self._first = request.keep_length + len(request.append_token_ids) - ahead.num_unverified
        self._last = self._first + (ahead.num_unverified or request.max_tokens)
        self._root = 0  # `ahead_id` of the proposal that is being verified
        self._making: dict[int, Answer] = {}
        self.complete: dict[int, DraftChunk] = {}
        self.max_bytes = self._answer(request.round_id, self._first, 0).max_bytes

    def following(self, keep_length: int, next_token_id: int) -> DraftChunk | None:
        """Return the proposal behind this verdict on the one that is verified, if it is there."""
        for each in self.complete.values():
            on = each.keep_length, each.next_token_id
            if each.follows_ahead_id == self._root and on == (keep_length, next_token_id):
                return each
        return None

    def confirmed(self, request: DraftAdvance, sent_ns: int) -> None:
        """Note the request which says that all of a proposal made ahead is being verified."""
        ahead = request.ahead
        assert ahead is not None
        self._root = ahead.unverified_ahead_id
        root = self.complete.pop(self._root)
        self._first, self._last = root.start_position, root.start_position + len(root.token_ids)
        self._asked[request.round_id] = request, ahead, sent_ns
        found = self.complete.items()
        kept = behind(self._root, ((i, each.follows_ahead_id) for i, each in found))
        self.complete = {i: each for i, each in found if i in kept}
        self._making = {
            i: a for i, a in self._making.items() if self._is_known(a.proposal.follows_ahead_id)
        }

    def expects(self, chunk: DraftChunk) -> bool:
        """True if a chunk follows what there is; else it was made ahead of another verdict."""
        return chunk.round_id in self._asked and self._is_known(chunk.follows_ahead_id)

    def _is_known(self, ahead_id: int) -> bool:
        return ahead_id == self._root or ahead_id in self.complete

    def add(self, chunk: DraftChunk, now_ns: int) -> DraftChunk | None:
        """Add an expected chunk; return its proposal once it is whole.

        Raises `DrafterFaultError`.
        """
        ahead_id, first, last = chunk.ahead_id, self._first, self._last
        if (followed := self.complete.get(chunk.follows_ahead_id)) is not None:
            first = followed.start_position
            last = first + len(followed.token_ids)
        answer = self._making.get(ahead_id)
        if answer is None:
            answer = self._answer(chunk.round_id, chunk.keep_length, chunk.next_token_id)
            self._making[ahead_id] = answer
        if not first <= chunk.keep_length <= last:
            answer.refuse(
                DraftFault.POSITION,
                f"a proposal ahead that follows {chunk.keep_length} tokens, not {first} to {last}",
            )
        if not ahead_id or ahead_id in (self._root, *self.complete):
            answer.refuse(DraftFault.ROUND, f"a second proposal ahead with number {ahead_id}")
        most = max(ahead.num_proposals for _, ahead, _ in self._asked.values())
        if len(self._making) + len(self.complete) > most:
            answer.refuse(DraftFault.ROUND, f"more than {most} proposals ahead")
        answer.add(chunk, now_ns)
        if not answer.complete:
            return None
        del self._making[ahead_id]
        self.complete[ahead_id] = proposal = replace(
            answer.proposal, keep_length=chunk.keep_length, next_token_id=chunk.next_token_id
        )
        return proposal

    def _answer(self, round_id: int, keep_length: int, next_token_id: int) -> Answer:
        request, ahead, sent_ns = self._asked[round_id]
        request = replace(
            request,
            keep_length=keep_length,
            append_token_ids=(next_token_id,),
            max_tokens=ahead.max_tokens,
            score=False,
        )
        return Answer(request, self._open, next_token_id, sent_ns)
