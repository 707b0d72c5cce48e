"""Stages rounds at the target while it verifies one, so that a hit begins the next with no trip.

The drafter goes on while a round is verified, and pushes proposals for its likeliest verdicts. Each
becomes a round that the target begins by itself if it reaches that verdict. Staging changes no
text: a staged round is the one that would be sent, only earlier.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import NamedTuple

from flyspec.values.rounds import DraftChunk, StagedOn, Verdict, VerifyRound
from orchestrator.generation.drafting import Drafting
from orchestrator.generation.ledger import Ledger
from orchestrator.generation.staging_trial import StagingTrial
from orchestrator.generation.verifying import Verifying

NUM_PROPOSALS = 4
"""Proposals ahead per round: all accepted, and the second choices at the three likeliest places."""


class Begun(NamedTuple):
    """A staged round that the target begins by itself, and its proposal."""

    round_id: int
    proposal: DraftChunk


class Staging:
    """Stages the next rounds of one generation.

    `make_round` returns the round that would verify a proposal made ahead, given how many tokens
    more than now the sequence then has, and those; None if there would be none. `eos_token_ids` end
    a generation, so nothing follows them.
    """

    def __init__(
        self,
        drafting: Drafting,
        verifying: Verifying,
        ledger: Ledger,
        trial: StagingTrial,
        make_round: Callable[[StagedOn, DraftChunk, list[int]], VerifyRound | None],
        eos_token_ids: Collection[int],
    ) -> None:
        self._drafting, self._verifying, self._ledger = drafting, verifying, ledger
        self._trial, self._make_round = trial, make_round
        self._eos = frozenset(eos_token_ids)
        self._staged: dict[StagedOn, Begun] = {}
        self._task: asyncio.Task[None] | None = None
        self._wanted = False

    @property
    def num_proposals(self) -> int:
        """How many proposals ahead the next request to the drafter should ask for."""
        most = min(NUM_PROPOSALS, self._drafting.max_proposals_ahead)
        self._wanted = most > 0 and self._verifying.may_stage and self._trial.stages
        return most if self._wanted else 0

    def begin(self, round_: VerifyRound, proposal: DraftChunk) -> bool:
        """Begin to stage for the verdicts on a round that has been sent; return whether it does.

        If the target was lost and the round sent again, this goes on.
        """
        if self._task is not None:
            return True
        if not self._wanted or not proposal.token_ids:
            return False
        self._task = asyncio.create_task(self._stage(round_, proposal))
        return True

    async def end(self, verdict: Verdict) -> Begun | None:
        """Stop, since the verdict is known; return the round that it begins, if it is staged."""
        if self._task is None:
            return None
        await self.close()
        staged, self._staged = self._staged, {}
        begun = staged.get(verdict.on)
        if staged:
            self._ledger.metrics.num_staging_rounds += 1
            self._ledger.metrics.num_staged_hits += begun is not None
        return begun

    def ran(self, round_ns: int) -> None:
        """Record the time of a round with drafts."""
        self._trial.ran(self._wanted, round_ns)

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))

    async def _stage(self, round_: VerifyRound, proposal: DraftChunk) -> None:
        drafts, start = proposal.token_ids, proposal.start_position
        while (pushed := await self._drafting.next_ahead()) is not None:
            on = StagedOn(round_.round_id, pushed.keep_length, pushed.next_token_id)
            behind = [*drafts[: on.keep_length - start], on.next_token_id]
            if not self._eos.isdisjoint(behind) or on.keep_length > start + len(drafts):
                continue
            staged = self._make_round(on, pushed, behind)
            if staged is None or not await self._verifying.stage(staged):
                continue
            count = len(staged.draft_token_ids)
            self._staged[on] = Begun(staged.round_id, pushed.cut(0, count))
