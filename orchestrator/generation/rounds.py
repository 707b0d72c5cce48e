"""The core loop: propose, verify, commit; one round at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

from flyspec.draft_trees import main_path
from flyspec.errors import FlyspecError
from flyspec.values.rounds import DraftChunk, Verdict, VerifyRound
from orchestrator.generation.ledger import NOTHING, RoundOutcome
from orchestrator.generation.pace import CheckedRound
from orchestrator.generation.progress import Progress
from orchestrator.generation.proposing import Proposing
from orchestrator.generation.staging import StagingTrial
from orchestrator.generation.window import (
    Checked,
    Command,
    Commit,
    Extend,
    NothingDrafted,
    RollBack,
    step,
)

KEPT_S = 0.005
"""Maximum seconds a round is kept back while the drafter works."""


class JudgedRound(NamedTuple):
    """A verdict on a round: on its proposal as far as the target judged it, of a tree one path.

    `num_drafted` are the drafts that the target has read, more than were judged of a tree. Without
    request and verdict, an open window fails, since the drafter has no proposal.
    """

    proposal: DraftChunk
    request: VerifyRound | None = None
    verdict: Verdict | None = None
    num_drafted: int = 0


class Rounds:
    """The rounds of one generation, until the caller stops iterating.

    The next round's proposal is requested before a round is yielded, and a round with drafts is
    yielded once the next one has been sent to the target, which works while the caller detokenizes
    and sends output. During plain decoding the drafter may follow the sequence; if the sequence has
    overtaken part of a proposal, the rest is verified.
    """

    def __init__(self, progress: Progress, trial: StagingTrial | None = None) -> None:
        self.progress = progress
        self._proposing = Proposing(progress, trial)
        self._kept: list[RoundOutcome] = []
        self._has_begun = False  # whether the round after the one that is verified has

    async def run(self) -> AsyncGenerator[RoundOutcome]:
        """Run rounds indefinitely; the caller stops when its output is complete."""
        proposing = self._proposing
        proposing.begin()
        try:
            while True:
                if self._kept and not await proposing.arrives(KEPT_S):
                    for outcome in self._take_kept():
                        yield outcome
                proposal = await proposing.proposal()
                async with aclosing(self._verify(proposal)) as judged:
                    async for each in judged:
                        if each is None:  # the target works, and so may the caller
                            for outcome in self._take_kept():
                                yield outcome
                            continue
                        outcome = await self._commit(each)
                        if self._can_wait(outcome):
                            self._kept.append(outcome)
                        else:
                            yield outcome
        except FlyspecError:
            for outcome in self._take_kept():
                yield outcome
            raise
        finally:
            await proposing.close()

    async def _verify(self, proposal: DraftChunk) -> AsyncGenerator[JudgedRound | None]:
        """Yield None once a round is with the target, then what it says of it.

        In plain decoding it says more and more, until the drafter has a proposal worth verifying.
        """
        progress, proposing, round_ = self.progress, self._proposing, self._proposing.round
        if round_.self_started is not None:
            yield JudgedRound(proposal, *round_.self_started, len(proposal.token_ids))
            return
        if progress.state.window and not proposal.token_ids:
            yield None
            yield JudgedRound(proposal)
            return
        request, plain = proposing.request(proposal), proposal is NOTHING
        self._has_begun = False
        round_.waiting_ns, round_.asked_ns = 0, time.perf_counter_ns()
        since_ns = round_.asked_ns
        check = progress.verifying.check(progress.sequence, request, proposal.distributions)
        async for verdict in check:
            round_.waiting_ns += time.perf_counter_ns() - since_ns
            if verdict is None:
                if not plain:
                    await proposing.sent(request, proposal)
                yield None
            else:
                if not plain:
                    await proposing.answered(verdict)
                yield self._judged(proposal, request, verdict)
                round_.waiting_ns = 0
                if plain and self._has_begun and not verdict.last:
                    return
            since_ns = time.perf_counter_ns()
        if not self._has_begun:
            await proposing.lost()

    def _judged(self, proposal: DraftChunk, request: VerifyRound, verdict: Verdict) -> JudgedRound:
        """Return a verdict with what it is about: drafts may not have been worth verifying."""
        progress, num_checked = self.progress, len(verdict.decisions)
        if num_checked < len(proposal.token_ids) and not proposal.parents:
            proposal = proposal.cut(0, num_checked)
        if verdict.top_token_ids:
            progress.drafting.learn(progress.sequence.tokens, request, verdict.top_token_ids)
        num_drafted = len(proposal.token_ids)
        if proposal.parents:
            path = verdict.path or main_path(proposal.parents)  # from a replica without trees
            num_drafted = num_drafted if verdict.path else len(path)
            proposal, request = proposal.along(path), request.along(path)
        return JudgedRound(proposal, request, verdict, num_drafted)

    async def _commit(self, judged: JudgedRound) -> RoundOutcome:
        """Extend the sequence by what was judged, and begin the next round."""
        progress, round_ = self.progress, self._proposing.round
        start, verdict, proposal = len(progress.sequence), judged.verdict, judged.proposal
        event: Checked | NothingDrafted = NothingDrafted()
        if verdict is not None:
            event = Checked(verdict, proposal.token_ids, proposal.origins)
        progress.state, commands = step(progress.state, event)
        for command in commands:
            self._carry_out(command)
        length = progress.state.committed_length
        if progress.phases is not None:
            progress.phases.commit(progress.sequence.tokens, length)
        progress.ledger.recoveries.output_token_index = (
            len(progress.sequence) - progress.prompt_length
        )
        now = time.perf_counter_ns()
        began_ns, round_.began_ns = round_.began_ns, now
        outcome = RoundOutcome(
            commands=commands,
            verdict=verdict,
            start=start,
            committed_length=length,
            round_ns=now - began_ns,
            request=judged.request,
            proposal=proposal,
            num_drafted=judged.num_drafted,
            round_id=judged.request.round_id if judged.request else round_.round_id,
            began_ns=began_ns,
            drafting_ns=max(0, round_.drafted_ns - began_ns),
            verifying_ns=now - max(round_.asked_ns, began_ns),
            waiting_ns=round_.waiting_ns,
        )
        if verdict is not None:
            self._learn(judged, outcome)
        await self._begin_next(judged)
        progress.watch(commands)
        return outcome

    def _learn(self, judged: JudgedRound, outcome: RoundOutcome) -> None:
        """Tell everyone who learns from verdicts of one."""
        progress, (proposal, request, verdict, num_drafted) = self.progress, judged
        assert verdict is not None
        emitted, round_ns = len(progress.sequence) - outcome.start, outcome.round_ns
        asked_head = request is not None and request.head is not None
        progress.pace.checked(
            CheckedRound(proposal, verdict, emitted, round_ns, num_drafted, asked_head)
        )
        self._proposing.judged(proposal, verdict, round_ns)
        if verdict.decisions:
            accepted, drafter = verdict.num_accepted, proposal.drafter
            progress.drafting.record(drafter, num_drafted, accepted, emitted, round_ns)

    async def _begin_next(self, judged: JudgedRound) -> None:
        """Begin the next round, unless plain decoding goes on; send its request to the drafter."""
        proposal, request, verdict, _ = judged
        self._has_begun = True
        if verdict is None or request is None:
            self.progress.pace.window_failed()
            self._proposing.begin()
        else:
            self._has_begun = self._proposing.begin_after(request, verdict, proposal is NOTHING)
        if self._has_begun:
            await asyncio.sleep(0)

    def _carry_out(self, command: Command) -> None:
        """Apply a command to the sequence; the caller applies it to the text."""
        if isinstance(command, Extend):
            self.progress.sequence.extend(command.token_ids)
        elif isinstance(command, RollBack):
            self.progress.cut(command.length, command.token_id)
            self._proposing.keep(command.length)

    def _can_wait(self, outcome: RoundOutcome) -> bool:
        """True if a round can be kept back until the next one, which has begun, is sent.

        That is if its output continues, with no stop strings or budget.
        """
        progress, plan = self.progress, self.progress.plan
        if not self._proposing.keeps or outcome.verdict is None or outcome.proposal is NOTHING:
            return False
        if progress.remaining <= 0 or plan.limits.stop or plan.judging.has_budget:
            return False
        tokens = (t for c in outcome.commands if isinstance(c, Commit) for t in c.tokens)
        return not any(token.token_id in plan.limits.end_token_ids for token in tokens)

    def _take_kept(self) -> list[RoundOutcome]:
        """Return and clear the rounds kept back.

        The caller needs about as long for a round as a small drafter for a proposal. Rounds are
        kept back so that it does this work while the target works, not while the drafter does.
        """
        kept, self._kept = self._kept, []
        return kept
