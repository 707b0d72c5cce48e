"""A drafter that follows plain decoding: its proposals are made while the target continues."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from flyspec.prefix import num_same
from flyspec.values.rounds import DraftChunk, DraftTimings


class Follower(NamedTuple):
    """A pending proposal, to follow the first `length` tokens of the sequence.

    It is compared once the sequence has `at_least` more tokens.
    """

    task: asyncio.Future[DraftChunk]
    length: int
    asked_ns: int
    at_least: int = 0

    def arrived(self, tokens: Sequence[int], now_ns: int) -> Overtaken | None:
        """Compare the proposal with the sequence, now `tokens`; None while it is pending."""
        if not self.task.done() or len(tokens) < self.length + self.at_least:
            return None
        proposal, behind = self.task.result(), tokens[self.length :]
        matched = num_same(proposal.token_ids, behind)
        return Overtaken(proposal, matched, len(behind), now_ns - self.asked_ns)


class Overtaken(NamedTuple):
    """A proposal that arrived after `num_behind` more tokens were decoded, `num_matched` matching.

    It was requested `asked_ns` ago.
    """

    proposal: DraftChunk
    num_matched: int
    num_behind: int
    asked_ns: int

    @property
    def passed(self) -> Overtaken:
        """The same, but it tells nothing of drafts that the sequence has not passed."""
        known = self.proposal.confidences[: self.num_behind]
        return self._replace(proposal=replace(self.proposal, confidences=known))

    @property
    def missed(self) -> bool:
        return self.num_matched < min(self.num_behind, len(self.proposal.token_ids))

    def rest(self, most: int) -> DraftChunk | None:
        """Return the part of the proposal that follows the sequence now, with zero timings."""
        if self.num_matched < self.num_behind:
            return None
        rest = self.proposal.cut(self.num_matched, self.num_matched + most)
        return replace(rest, timings=DraftTimings(), ahead=False) if rest.token_ids else None
