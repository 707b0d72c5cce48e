"""Stages rounds at the target while it verifies one, so that a hit begins the next with no trip.

The drafter goes on while a round is verified, and pushes proposals for its likeliest verdicts, and
for those on the rounds behind it. Each becomes a round that the target begins by itself if it
reaches that verdict. Staging changes no text: a staged round is the one that would be sent, only
earlier.

Nor does it change how many tokens a round emits, so measured times of rounds decide whether it is
done. It pays where trips take long or drafts as long as a step of the target, and costs where both
models share their processors.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from flyspec.draft_trees import behind
from flyspec.values.rounds import DraftAdvance, DraftChunk, StagedOn, Verdict, VerifyRound
from orchestrator.generation.progress import CurrentRound, Progress
from orchestrator.generation.sources import Awaited, Following

NUM_PROPOSALS = 8
"""Proposals ahead that the drafter may have made of verdicts to come: for all of the round that is
verified, with its second choices, and for what is staged behind it."""
TRIAL_ROUNDS = 24
"""Rounds with drafts for which a way is tried."""
FIRST_REST, LONGEST_REST = 96, 1536
"""Rounds between trials; twice as many after each that changes nothing."""
SKIPPED = 2
"""Rounds after a change that do not count: those before it still delay them."""
LATEST = 64
"""Recent rounds averaged."""
BETTER = 0.98
"""Ratio of round times below which staging counts as faster."""


class StagedPlace(NamedTuple):
    """A round that is verified or staged: the tokens between the sequence and its drafts, those."""

    round_id: int
    before: list[int]
    drafts: Sequence[int]


class Staging(Awaited):
    """Stages the next rounds of one generation, while its `trial` says so; None: never."""

    def __init__(
        self, progress: Progress, following: Following, trial: StagingTrial | None
    ) -> None:
        super().__init__(progress, following)
        plan = progress.plan
        self._trial = None if plan.judging.phases or plan.drafts.distribution else trial
        self._staged: dict[StagedOn, DraftChunk] = {}  # proposals, with the ids of their rounds
        # Of the round that is verified, and by `ahead_id`.
        self._places: dict[int, StagedPlace] = {}
        self._length = 0  # of the sequence when `_places` was filled
        self._pushes: asyncio.Task[None] | None = None
        self._begun: DraftChunk | None = None

    @property
    def _num_proposals(self) -> int:
        """Number of proposals ahead that the next request to the drafter should ask for."""
        progress = self._progress
        if self._trial is None or progress.pace.repeats or not self._trial.stages:
            return 0
        if not progress.verifying.may_stage:
            return 0
        return min(NUM_PROPOSALS, progress.drafting.max_proposals_ahead)

    def begin(self, round_: CurrentRound) -> bool:
        """Tell the drafter which of its proposals is verified, if the target has begun one."""
        round_.num_ahead = self._num_proposals
        proposal, self._begun = self._begun, None
        if proposal is None:
            return False
        progress = self._progress
        round_.begin(proposal.round_id)
        tokens = progress.sequence.tokens.copy()
        round_.num_wanted = len(proposal.token_ids)
        ahead = round_.ahead(round_.turn.num_drafts or round_.num_wanted)
        request = DraftAdvance(progress.new_round_id(), 0, (), 0, ahead=ahead)
        confirming = progress.drafting.confirm(tokens, proposal, request)
        self.task = asyncio.create_task(confirming)
        return True

    async def sent(self, round_: CurrentRound, request: VerifyRound, proposal: DraftChunk) -> bool:
        """Begin to stage for the verdicts on a round, which the target has now.

        If the target was lost and the round sent again, this goes on.
        """
        if self._pushes is not None:
            return True
        if not round_.stages or not proposal.token_ids:
            self._forget()
            return False
        length = len(self._progress.sequence)
        grown, self._length = length - self._length, length
        places = {i: p._replace(before=p.before[grown:]) for i, p in self._places.items()}
        here = StagedPlace(request.round_id, [], proposal.token_ids)
        self._places = places | {0: here, proposal.ahead_id: here}
        self._pushes = asyncio.create_task(self._stage(round_))
        return True

    async def end(self, verdict: Verdict) -> None:
        """Stop, since the verdict is known; note the round that it begins, if it is staged."""
        if self._pushes is None:
            return
        await self.stop()
        metrics = self._progress.ledger.metrics
        begun = self._begun = self._staged.get(verdict.on)
        if any(on.round_id == verdict.round_id for on in self._staged):
            metrics.num_staging_rounds += 1
            metrics.num_staged_hits += begun is not None
        if begun is None:
            self._forget()
            return
        # The target drops what does not follow it.
        staged = self._staged.items()
        kept = behind(begun.round_id, ((each.round_id, on.round_id) for on, each in staged))
        self._staged = {on: each for on, each in staged if on.round_id in kept}
        self._places = {i: p for i, p in self._places.items() if p.round_id in kept}

    def judged(
        self, round_: CurrentRound, proposal: DraftChunk, verdict: Verdict, round_ns: int
    ) -> None:
        if self._trial is not None and verdict.decisions:
            self._trial.ran(round_.stages, round_ns)

    def _forget(self) -> None:
        self._staged, self._places = {}, {}

    async def stop(self) -> None:
        """Stage no more for the round that is verified."""
        pushes, self._pushes = self._pushes, None
        if pushes is not None:
            pushes.cancel()
            await asyncio.wait((pushes,))

    async def close(self) -> None:
        await super().close()
        await self.stop()

    async def _stage(self, round_: CurrentRound) -> None:
        progress = self._progress
        eos = progress.plan.limits.end_token_ids  # nothing follows the end of a generation
        while (pushed := await progress.drafting.next_ahead()) is not None:
            if (place := self._places.get(pushed.follows_ahead_id)) is None:
                continue  # that one is not staged
            on = StagedOn(place.round_id, pushed.keep_length, pushed.next_token_id)
            num_kept = on.keep_length - self._length - len(place.before)
            before = [*place.before, *place.drafts[:num_kept], on.next_token_id]
            if not eos.isdisjoint(before) or num_kept > len(place.drafts):
                continue
            staged = progress.staged_request(round_, on, pushed, before)
            if staged is None or not await progress.verifying.stage(staged):
                continue
            drafts = staged.draft_token_ids
            self._places[pushed.ahead_id] = StagedPlace(staged.round_id, before, drafts)
            self._staged[on] = replace(pushed.cut(0, len(drafts)), round_id=staged.round_id)


class StagingTrial:
    """The trial for one drafter; `stages` says whether the next round should be staged.

    With `always`, it is, without a trial.
    """

    def __init__(self, always: bool = False) -> None:
        self._always = always
        self._round_ns = {way: deque[int](maxlen=LATEST) for way in (False, True)}
        self._turns = self._take_turns()
        self.stages = next(self._turns) or always

    def ran(self, staged: bool, round_ns: int) -> None:
        """Record the time of a round with drafts, and choose for the next one.

        One that could not be staged does not count.
        """
        if staged is self.stages and not self._always:
            self.stages = self._turns.send(round_ns)

    def _take_turns(self) -> Generator[bool, int]:
        """Yield whether the next round is staged; receives its time."""
        chosen, rest = False, FIRST_REST
        yield from self._run(chosen, TRIAL_ROUNDS)
        while True:
            self._round_ns[not chosen].clear()
            yield from self._run(not chosen, TRIAL_ROUNDS)
            better = fmean(self._round_ns[True]) < BETTER * fmean(self._round_ns[False])
            rest = FIRST_REST if better is not chosen else min(2 * rest, LONGEST_REST)
            chosen = better
            yield from self._run(chosen, rest)

    def _run(self, way: bool, num_rounds: int) -> Generator[bool, int]:
        for index in range(num_rounds):
            round_ns = yield way
            if index >= SKIPPED:
                self._round_ns[way].append(round_ns)
