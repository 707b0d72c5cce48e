"""The sources of the next round's drafts: the interface, a prediction, and the drafter.

The drafter is asked for each round, ahead of it while the target verifies the one before, or beside
plain decoding. Staged rounds and those of a head have files of their own.
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod

from flyspec.drafter_names import PREDICTION
from flyspec.values.rounds import DraftAdvance, DraftChunk, Verdict, VerifyRound
from flyspec.values.tokens import Origin
from orchestrator.generation.following import Follower
from orchestrator.generation.ledger import NOTHING
from orchestrator.generation.prediction import Prediction
from orchestrator.generation.progress import CurrentRound, Progress
from orchestrator.generation.proposals import proposal_of

AHEAD = 0.5
"""Minimum share of recent rounds in which drafting ahead was, or would have been, useful."""
AHEAD_MEMORY = 0.7
"""Factor by which a round fades in that share with each further one."""


class Source(ABC):
    """A source of proposals. `task` is what has to be waited for, if anything."""

    task: asyncio.Task[DraftChunk] | None = None
    keeps = True
    """True if the last round's outcome may be kept back while this source proposes."""

    @abstractmethod
    def begin(self, round_: CurrentRound) -> bool:
        """Get the drafts of a round that begins; return whether they come from here."""

    @abstractmethod
    async def proposal(self, round_: CurrentRound) -> DraftChunk | None:
        """Return the drafts: `NOTHING` if the target is not to wait for them.

        None if there are none after all, so that the round begins once more.
        """

    async def sent(self, round_: CurrentRound, request: VerifyRound, proposal: DraftChunk) -> bool:
        """Use the time until the verdict on a round; return whether no other source should."""
        return False

    def skipped(self) -> None:  # noqa: B027 - optional
        """Note that the round's drafts come from elsewhere."""

    def judged(  # noqa: B027
        self, round_: CurrentRound, proposal: DraftChunk, verdict: Verdict, round_ns: int
    ) -> None:
        """Learn from the verdict on a proposal, from whatever source."""

    def keep(self, length: int) -> None:  # noqa: B027
        """Record that the sequence was cut back to `length` tokens."""

    async def close(self) -> None:
        if self.task is not None:
            self.task.cancel()


class Predicted(Source):
    """The request's predicted output, which goes before any drafter."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._drafts = progress, progress.plan.drafts
        self._prediction = Prediction(self._drafts.prediction, self._drafts.invisible)
        self._proposal = NOTHING

    def begin(self, round_: CurrentRound) -> bool:
        progress, most = self._progress, self._drafts.num_speculative_tokens
        if not self._drafts.prediction:
            return False
        if progress.pace.repeats:
            most = round_.turn.num_drafts
        self._prediction.follow(progress.sequence.tokens[progress.prompt_length :])
        limit = progress.draft_limit(0, most) if most else 0
        token_ids = self._prediction.propose(limit) if limit > 0 else []
        if not token_ids:
            return False
        round_.num_wanted = len(token_ids)
        certain = self._drafts.distribution is not None
        self._proposal = proposal_of(token_ids, Origin.PREDICTED, PREDICTION, certain)
        return True

    async def proposal(self, round_: CurrentRound) -> DraftChunk | None:
        round_.begin(self._progress.new_round_id())
        return self._proposal

    def judged(
        self, round_: CurrentRound, proposal: DraftChunk, verdict: Verdict, round_ns: int
    ) -> None:
        if proposal.drafter == PREDICTION:
            self._prediction.checked(len(verdict.decisions), verdict.num_accepted)

    def keep(self, length: int) -> None:
        self._prediction.keep(length - self._progress.prompt_length)


class Following(Source):
    """The drafter beside plain decoding, which goes on meanwhile; its proposals may be overtaken.

    If drafts are drawn (`DraftPlan.draws`), what is proposed here says only what would have been
    drafted: it is heard of when the sequence has passed it.
    """

    keeps = False

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._pending: Follower | None = None
        self._rest: DraftChunk | None = None

    @property
    def is_pending(self) -> bool:
        return self._pending is not None

    def begin(self, round_: CurrentRound) -> bool:
        if self._pending is None:
            return False
        round_.begin(self._progress.new_round_id())
        return True

    async def proposal(self, round_: CurrentRound) -> DraftChunk | None:
        progress, pending = self._progress, self._pending
        if (
            self._rest is None
            and pending
            and pending.length == progress.prompt_length
            and progress.draft_limit(0, round_.turn.num_drafts)
        ):
            # It was asked for after the prompt; if the output differs, the round begins anew.
            await in_time(progress, round_, pending.task)
            self._pending = pending._replace(at_least=0)
            self.follow(round_)
        rest, self._rest = self._rest, None
        if rest is not None:
            round_.begin(progress.new_round_id())
            return rest
        return NOTHING if self._pending else None

    def follow(self, round_: CurrentRound) -> bool:
        """Ask the drafter, or take its proposal if it is still valid; return whether it is."""
        progress, pace = self._progress, self._progress.pace
        drafting = progress.drafting
        if round_.head_query:
            return False
        if self._pending is None:
            if k := pace.follows():
                drafting.look_around()
                if drafting.reads_verdicts:
                    round_.head_query = k
                    return False
                round_.round_id = progress.new_round_id()
                request = DraftAdvance(round_.round_id, 0, (), k, score=True)
                self.adopt(ask(progress, round_, request), k if progress.plan.drafts.draws else 0)
        elif overtaken := self._pending.arrived(progress.sequence.tokens, time.perf_counter_ns()):
            self._pending = None
            progress.ledger.followed(overtaken.proposal)
            pace.followed(overtaken.passed if progress.plan.drafts.draws else overtaken)
            round_.turn = pace.turn()
            if drafting.repeats(overtaken.proposal):
                limit = progress.draft_limit(0, round_.turn.num_drafts)
                round_.num_wanted = min(round_.num_wanted - overtaken.num_behind, limit)
                self._rest = overtaken.rest(limit)
        return self._rest is not None

    def adopt(
        self, task: asyncio.Future[DraftChunk], at_least: int = 0, asked_ns: int | None = None
    ) -> None:
        """Follow plain decoding with a request for what comes behind the sequence as it is now."""
        asked_ns = time.perf_counter_ns() if asked_ns is None else asked_ns
        self._pending = Follower(task, len(self._progress.sequence), asked_ns, at_least)

    def receive(self, round_: CurrentRound, request: VerifyRound, verdict: Verdict) -> None:
        """Take a head's proposal from a verdict that the sequence has just been extended by.

        If it was only asked how good it is, what the target decodes next will tell.
        """
        progress, drafting = self._progress, self._progress.drafting
        drafting.received(request.head, verdict)
        if request.head is None or not verdict.last or not round_.head_query:
            return
        round_.head_query = 0
        if progress.pace.turn().num_drafts:
            return  # the next round takes it
        block = drafting.take_block(progress.sequence.tokens, request.head.max_tokens)
        if block is not None and block.token_ids:
            task: asyncio.Future[DraftChunk] = asyncio.get_running_loop().create_future()
            task.set_result(block)
            self.adopt(task, len(block.token_ids))

    async def close(self) -> None:
        if self._pending is not None:
            self._pending.task.cancel()


class Awaited(Source):
    """A source whose drafts are waited for; in plain decoding if they take too long."""

    def __init__(self, progress: Progress, following: Following) -> None:
        self._progress, self._following = progress, following

    async def proposal(self, round_: CurrentRound) -> DraftChunk | None:
        """Return the drafts; while a window is open, they are waited for however long they take."""
        progress, task = self._progress, self.task
        assert task is not None
        if progress.state.window is None and not await in_time(progress, round_, task):
            self._following.adopt(task, asked_ns=round_.began_ns)
            self.task = None
            return NOTHING
        proposal = await task
        round_.drafted_ns = proposal.arrived_ns
        if proposal.ahead:
            round_.round_id = proposal.round_id  # this round's own id was not used
        if not proposal.token_ids and not progress.drafting.reads_verdicts:
            progress.pace.nothing_drafted()
        likely = proposal.parents or (math.prod(proposal.confidences) >= round_.turn.min_confidence)
        progress.ledger.metrics.num_drafter_stops += not likely
        return proposal


class AskedDrafter(Awaited):
    """The drafter, asked for each round; for the next one while a proposal is verified.

    What it drafts ahead follows if all is accepted. It begins with the bonus token, which the
    drafter usually predicts correctly. Since it costs the drafter time, this is only done if it was
    useful in most recent rounds. If K adapts, the round may then have fewer drafts than are useful.
    """

    def __init__(self, progress: Progress, following: Following) -> None:
        super().__init__(progress, following)
        self._ahead: DraftAdvance | None = None  # requested while the last proposal was verified
        self._comes_ahead = False  # whether it was when this round began
        self._if_whole = 0  # the sequence's length if all of the last proposal is accepted
        self._num_useful = self._num_observed = 1.0

    def begin(self, round_: CurrentRound) -> bool:
        progress, turn, plan = self._progress, round_.turn, self._progress.plan
        round_.begin(progress.new_round_id())
        limit = progress.draft_limit(0, turn.num_drafts)
        ahead = self._ahead
        if ahead is None and self._if_whole:
            self._observe(len(progress.sequence) == self._if_whole)
        elif ahead and plan.drafts.adaptive and not progress.pace.repeats:
            limit = min(limit, ahead.max_tokens - 1)
        self.skipped()
        self._comes_ahead = ahead is not None
        if limit <= 0:
            return False
        trees = plan.may_draft_trees and progress.verifying.takes_trees
        request = DraftAdvance(
            round_.round_id, 0, (), limit, min_confidence=turn.min_confidence,
            ahead=round_.ahead(limit), max_tree_tokens=limit if trees else 0,
        )  # fmt: skip
        self.task = ask(progress, round_, request)
        return True

    def skipped(self) -> None:
        self.task, self._ahead, self._if_whole = None, None, 0

    async def proposal(self, round_: CurrentRound) -> DraftChunk | None:
        proposal = await super().proposal(round_)
        if self._comes_ahead and proposal is not None and proposal is not NOTHING:
            self._observe(proposal.ahead)
        return proposal

    async def sent(self, round_: CurrentRound, request: VerifyRound, proposal: DraftChunk) -> bool:
        if proposal.drafter == PREDICTION or proposal.parents:
            return False
        progress, num_drafts = self._progress, len(proposal.token_ids)
        length = len(progress.sequence) + num_drafts
        self._if_whole = length + 1
        useful = self._num_useful >= AHEAD * self._num_observed
        if self._ahead or not useful or not progress.drafting.repeats(proposal):
            return False
        limit = progress.draft_limit(num_drafts + 1, round_.turn.num_drafts)
        if limit <= 0 or num_drafts < round_.num_wanted:  # the drafter stopped early
            return False
        self._ahead = DraftAdvance(
            progress.new_round_id(), 0, (), limit + 1, min_confidence=round_.turn.min_confidence
        )
        await progress.drafting.propose_ahead(length, self._ahead)
        return True

    def _observe(self, useful: bool) -> None:
        self._num_useful = self._num_useful * AHEAD_MEMORY + useful
        self._num_observed = self._num_observed * AHEAD_MEMORY + 1


def ask(
    progress: Progress, round_: CurrentRound, request: DraftAdvance
) -> asyncio.Task[DraftChunk]:
    """Ask the drafter for what follows the sequence as it is now."""
    tokens = progress.sequence.tokens.copy()
    round_.num_wanted = request.max_tokens
    proposing = progress.drafting.propose(tokens, request, progress.pace.repeats)
    return asyncio.create_task(proposing)


async def in_time(
    progress: Progress, round_: CurrentRound, asked: asyncio.Future[DraftChunk]
) -> bool:
    """Wait for a proposal up to the turn's patience; return whether it arrived.

    If drafts are drawn, none is dropped for being late, since how long a proposal takes depends on
    what is drawn.
    """
    if not asked.done():
        patience_ns = None if progress.plan.drafts.draws else round_.turn.patience_ns
        timeout_s = None if patience_ns is None else patience_ns / 1e9
        await asyncio.wait((asked,), timeout=timeout_s)
        round_.drafted_ns = time.perf_counter_ns()
    return asked.done()
