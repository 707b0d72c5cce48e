"""Chooses the source of each round's drafts: the first that has any."""

from __future__ import annotations

import asyncio

from flyspec.values.rounds import DraftChunk, Verdict, VerifyRound
from orchestrator.generation.head_rounds import HeadRounds
from orchestrator.generation.ledger import NOTHING
from orchestrator.generation.progress import CurrentRound, Progress
from orchestrator.generation.sources import AskedDrafter, Following, Predicted, Source
from orchestrator.generation.staging import Staging, StagingTrial


class Proposing:
    """One generation's proposals, one for each `round`; with a `trial`, rounds may be staged."""

    def __init__(self, progress: Progress, trial: StagingTrial | None) -> None:
        self._progress = progress
        self.round = CurrentRound(progress.pace.turn())
        self._following = Following(progress)
        self._staging = Staging(progress, self._following, trial)
        self._heads = HeadRounds(progress)
        self._predicted = Predicted(progress)
        self._asked = AskedDrafter(progress, self._following)
        self._sources: tuple[Source, ...] = (
            self._staging, self._heads, self._following, self._predicted, self._asked,
        )  # fmt: skip
        self._source: Source | None = None

    @property
    def keeps(self) -> bool:
        """True if the last round's outcome may wait for the drafts of this one."""
        return self._source is not None and self._source.keeps

    def begin(self) -> None:
        """Begin a round: get drafts from the first source that has any."""
        self.round.turn = self._progress.pace.turn()
        self._source = next((each for each in self._sources if each.begin(self.round)), None)
        if self._source is not self._asked:
            self._asked.skipped()

    async def arrives(self, within_s: float) -> bool:
        """Wait up to `within_s` for the drafts; return whether none are on their way."""
        task = self._source.task if self._source else None
        if task is not None:
            await asyncio.wait((task,), timeout=within_s)
        return task is None or task.done()

    async def proposal(self) -> DraftChunk:
        """Return the drafts of the round; `NOTHING` to decode without."""
        self.round.self_started = None
        while self._source is not None:
            proposal = await self._source.proposal(self.round)
            if proposal is not None:
                return proposal
            self.begin()
        return NOTHING

    def request(self, proposal: DraftChunk) -> VerifyRound:
        """Return the request of the round, with those that a head may go on with after it."""
        progress = self._progress
        request = self._heads.allow(progress.request(self.round, proposal))
        if proposal is NOTHING and len(progress.sequence) == progress.prompt_length:
            self._follow()  # the drafter may read the prompt while the target does
        return request

    async def sent(self, request: VerifyRound, proposal: DraftChunk) -> None:
        """Use the time until the verdict on drafts that the target has now."""
        if not await self._staging.sent(self.round, request, proposal):
            await self._asked.sent(self.round, request, proposal)

    async def answered(self, verdict: Verdict) -> None:
        """Take note of a verdict on drafts, before the sequence is extended."""
        await self._staging.end(verdict)

    def judged(self, proposal: DraftChunk, verdict: Verdict, round_ns: int) -> None:
        """Learn from a verdict by which the sequence was extended."""
        for source in self._sources:
            source.judged(self.round, proposal, verdict, round_ns)

    def begin_after(self, request: VerifyRound, verdict: Verdict, plain: bool) -> bool:
        """Take what comes with a verdict and begin the next round; return whether it has begun.

        Amid plain decoding it begins if there are drafts for it, or should be.
        """
        round_, following = self.round, self._following
        if not self._heads.continues(request, verdict):
            following.receive(round_, request, verdict)
            if plain and self._follow():
                return True
            if plain and not (verdict.last or round_.head_query):
                turn = self._progress.pace.turn()
                useful = self._progress.draft_limit(0, turn.num_drafts) > 0
                if following.is_pending or not useful:
                    return False
        self.begin()
        return True

    def _follow(self) -> bool:
        """Look for a proposal during plain decoding; return whether there is one."""
        if self._predicted.begin(self.round):
            self._source = self._predicted
        elif self._following.follow(self.round):
            self._source = self._following
        else:
            return False
        return True

    def keep(self, length: int) -> None:
        """Record that the sequence was cut back to `length` tokens."""
        for source in self._sources:
            source.keep(length)

    async def lost(self) -> None:
        """Begin the round once more: the target was lost."""
        await self._staging.stop()
        self.begin()

    async def close(self) -> None:
        for source in reversed(self._sources):  # only staging takes time
            await source.close()
