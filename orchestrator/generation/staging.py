"""Stages rounds at the target while it verifies one, so that a hit begins the next with no trip.

The drafter goes on while a round is verified, and pushes proposals for its likeliest verdicts, and
for those on the rounds behind it. Each becomes a round that the target begins by itself if it
reaches that verdict. Staging changes no text: a staged round is the one that would be sent, only
earlier.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from flyspec.draft_trees import behind
from flyspec.values.rounds import DraftChunk, StagedOn, Verdict, VerifyRound
from orchestrator.generation.drafting import Drafting
from orchestrator.generation.ledger import Ledger
from orchestrator.generation.staging_trial import StagingTrial
from orchestrator.generation.verifying import Verifying

NUM_PROPOSALS = 8
"""Proposals ahead that the drafter may have made of verdicts to come: for all of the round that is
verified, with its second choices, and for what is staged behind it."""


class Begun(NamedTuple):
    """A staged round that the target begins by itself, and its proposal."""

    round_id: int
    proposal: DraftChunk


class StagedPlace(NamedTuple):
    """A round that is verified or staged: the tokens between the sequence and its drafts, those."""

    round_id: int
    before: list[int]
    drafts: Sequence[int]


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
        self._places: dict[
            int, StagedPlace
        ] = {}  # of the round that is verified, and by `ahead_id`
        self._length = 0  # of the sequence when `_places` was filled
        self._task: asyncio.Task[None] | None = None
        self._wanted = False

    @property
    def num_proposals(self) -> int:
        """How many proposals ahead the next request to the drafter should ask for."""
        most = min(NUM_PROPOSALS, self._drafting.max_proposals_ahead)
        self._wanted = most > 0 and self._verifying.may_stage and self._trial.stages
        return most if self._wanted else 0

    def begin(self, round_: VerifyRound, proposal: DraftChunk, length: int) -> bool:
        """Begin to stage for the verdicts on a round, of a sequence of `length` tokens.

        It has been sent, or the target has begun it. Returns whether this does anything. If the
        target was lost and the round sent again, this goes on.
        """
        if self._task is not None:
            return True
        if not self._wanted or not proposal.token_ids:
            self._forget()
            return False
        grown, self._length = length - self._length, length
        places = {i: p._replace(before=p.before[grown:]) for i, p in self._places.items()}
        here = StagedPlace(round_.round_id, [], proposal.token_ids)
        self._places = places | {0: here, proposal.ahead_id: here}
        self._task = asyncio.create_task(self._stage())
        return True

    async def end(self, verdict: Verdict) -> Begun | None:
        """Stop, since the verdict is known; return the round that it begins, if it is staged."""
        if self._task is None:
            return None
        await self.close()
        begun = self._staged.get(verdict.on)
        if any(on.round_id == verdict.round_id for on in self._staged):
            self._ledger.metrics.num_staging_rounds += 1
            self._ledger.metrics.num_staged_hits += begun is not None
        if begun is None:
            self._forget()
        else:
            self._keep_behind(begun)
        return begun

    def _keep_behind(self, begun: Begun) -> None:
        """Forget what does not follow a round: the target drops it."""
        staged = self._staged.items()
        kept = behind(begun.round_id, ((each.round_id, on.round_id) for on, each in staged))
        self._staged = {on: each for on, each in staged if on.round_id in kept}
        self._places = {i: p for i, p in self._places.items() if p.round_id in kept}

    def _forget(self) -> None:
        self._staged, self._places = {}, {}

    def ran(self, round_ns: int) -> None:
        """Record the time of a round with drafts."""
        self._trial.ran(self._wanted, round_ns)

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))

    async def _stage(self) -> None:
        while (pushed := await self._drafting.next_ahead()) is not None:
            if (place := self._places.get(pushed.follows_ahead_id)) is None:
                continue  # that one is not staged
            on = StagedOn(place.round_id, pushed.keep_length, pushed.next_token_id)
            num_kept = on.keep_length - self._length - len(place.before)
            before = [*place.before, *place.drafts[:num_kept], on.next_token_id]
            if not self._eos.isdisjoint(before) or num_kept > len(place.drafts):
                continue
            staged = self._make_round(on, pushed, before)
            if staged is None or not await self._verifying.stage(staged):
                continue
            drafts = staged.draft_token_ids
            self._places[pushed.ahead_id] = StagedPlace(staged.round_id, before, drafts)
            self._staged[on] = Begun(staged.round_id, pushed.cut(0, len(drafts)))
