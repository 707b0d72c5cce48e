"""The drafter behind plain decoding: what it proposes while the target goes on by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from flyspec.prefix import num_same
from flyspec.values.rounds import DraftChunk, DraftTimings


class Follower(NamedTuple):
    """A proposal in the making, to follow the first `length` tokens of the sequence."""

    task: asyncio.Task[DraftChunk]
    length: int
    asked_ns: int

    def arrived(self, tokens: Sequence[int], now_ns: int) -> Overtaken | None:
        """What has become of it, now that the sequence is `tokens`; None while it is made."""
        if not self.task.done():
            return None
        proposal, behind = self.task.result(), tokens[self.length :]
        matched = num_same(proposal.token_ids, behind)
        return Overtaken(proposal, matched, len(behind), now_ns - self.asked_ns)


class Overtaken(NamedTuple):
    """A proposal, and the text that came meanwhile: `num_behind` tokens, `num_matched` the same.

    It was asked for `asked_ns` ago.
    """

    proposal: DraftChunk
    num_matched: int
    num_behind: int
    asked_ns: int

    @property
    def missed(self) -> bool:
        """Whether the text has gone another way."""
        return self.num_matched < min(self.num_behind, len(self.proposal.token_ids))

    def rest(self, most: int) -> DraftChunk | None:
        """Of the proposal, what may follow the text now; nobody has waited for it."""
        if self.num_matched < self.num_behind:
            return None
        rest = self.proposal.cut(self.num_matched, self.num_matched + most)
        return replace(rest, timings=DraftTimings(), ahead=False) if rest.token_ids else None
