"""The core loop: propose, verify, extend the sequence; one round at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing

from flyspec.draft_trees import main_path
from flyspec.drafter_names import PREDICTION
from flyspec.errors import FlyspecError
from flyspec.values.rounds import (
    DraftChunk,
    Verdict,
    VerifyRound,
)
from flyspec.values.tokens import TokenDistribution
from orchestrator.generation.drafting import Drafting
from orchestrator.generation.ledger import NOTHING, Ledger, RoundOutcome
from orchestrator.generation.next_proposal import NextProposal
from orchestrator.generation.pace import SHORT_PROMPT, CheckedRound, Pace
from orchestrator.generation.phases import Phases
from orchestrator.generation.plan import GenerationPlan
from orchestrator.generation.prediction import Prediction
from orchestrator.generation.proposals import PredictedDrafts
from orchestrator.generation.recoveries import Recoveries
from orchestrator.generation.round_requests import RoundRequests
from orchestrator.generation.staging import Begun, Staging
from orchestrator.generation.staging_trial import StagingTrial
from orchestrator.generation.verifying import Verifying
from orchestrator.generation.window import (
    Checked,
    Command,
    Commit,
    Event,
    Extend,
    NothingDrafted,
    RollBack,
    step,
)

KEPT_S = 0.005
"""Maximum seconds a round is kept back while the drafter works."""


def checked_of(verdict: Verdict, proposal: DraftChunk) -> Checked:
    return Checked(verdict, proposal.token_ids, proposal.origins)


class Rounds:
    """The rounds of one generation, until the caller stops iterating.

    The next round's proposal is requested before a round is yielded, and a round with drafts is
    yielded once the next one has been sent to the target, which works while the caller detokenizes
    and sends output. During plain decoding the drafter may follow the sequence; if the sequence has
    overtaken part of a proposal, the rest is verified.
    """

    def __init__(
        self,
        plan: GenerationPlan,
        pace: Pace,
        drafting: Drafting,
        verifying: Verifying,
        ledger: Ledger,
        recoveries: Recoveries,
        eos_token_ids: Collection[int] = (),
        control_token_ids: Collection[int] = (),
        phases: Phases | None = None,
        staging: StagingTrial | None = None,
    ) -> None:
        self._plan, self._pace, self._phases = plan, pace, phases
        self._eos = frozenset(eos_token_ids)
        self._asked_ns = self._waiting_ns = 0  # this round's verdict: when, and for how long
        self._kept: list[RoundOutcome] = []
        self._recoveries = recoveries
        self._drafting, self._verifying = drafting, verifying
        self._ledger = ledger
        self._prompt_length = len(plan.prompt_token_ids)
        self._requests = requests = RoundRequests(plan, pace, drafting, verifying, ledger, phases)
        self._sequence, self._head_rounds = requests.sequence, requests.head_rounds
        self._prediction: PredictedDrafts | None = None
        if plan.prediction:
            self._prediction = PredictedDrafts(
                Prediction(plan.prediction, control_token_ids),
                plan.num_speculative_tokens,
                plan.distribution is not None,
            )
        self._staging: Staging | None = None
        if staging is not None and phases is None and plan.distribution is None:
            self._staging = Staging(
                drafting, verifying, ledger, staging, requests.staged_request, self._eos
            )
        self._next = NextProposal(
            pace, drafting, self._sequence, requests.draft_limit, ledger, plan.adaptive,
            self._prediction, self._num_ahead, requests.may_be_tree, plan.draws,
        )  # fmt: skip
        requests.next = self._next

    async def run(self) -> AsyncGenerator[RoundOutcome]:
        """Run rounds indefinitely; the caller stops when its output is complete."""
        self._next.begin()
        try:
            while True:
                if self._kept and not await self._next.arrives(KEPT_S):
                    for round_ in self._take_kept():
                        yield round_
                rounds = await self._turn()
                async with aclosing(rounds):
                    async for told in rounds:
                        for round_ in self._take_kept() if told is None else (told,):
                            yield round_
        except FlyspecError:
            for round_ in self._take_kept():
                yield round_
            raise
        finally:
            self._next.close()
            if self._staging is not None:
                await self._staging.close()

    async def _turn(self) -> AsyncGenerator[RoundOutcome | None]:
        """Return what the next round is."""
        if begun := self._head_rounds.begun:
            return self._hear(begun)
        proposal = await self._next.proposal(self._requests.state.window is not None)
        if proposal is None:
            return self._decode()
        if self._requests.state.window and not proposal.token_ids:
            return self._fail_window(proposal)
        return self._check(proposal)

    async def _check(self, proposal: DraftChunk) -> AsyncGenerator[RoundOutcome | None]:
        """Run a round with drafts, or with none if the drafter proposed none.

        Yielding None, here and below, tells the caller to yield the rounds kept back.
        """
        request, staging = self._requests.allowing(proposal), self._staging
        distributions, answered = proposal.distributions, False
        async for verdict in self._verdicts(request, distributions):
            if verdict is None:
                if staging is None or not staging.begin(request, proposal, len(self._sequence)):
                    await self._next.draft_ahead(proposal)
                yield None
                continue
            begun = None if staging is None else await staging.end(verdict)
            num_checked = len(verdict.decisions)
            if num_checked < len(proposal.token_ids) and not proposal.parents:
                proposal = proposal.cut(0, num_checked)  # the rest were not worth verifying
            if verdict.top_token_ids:
                self._drafting.learn(self._sequence.tokens, request, verdict.top_token_ids)
            num_drafted = len(proposal.token_ids)
            if proposal.parents:
                path = verdict.path or main_path(proposal.parents)  # from a replica without trees
                num_drafted = num_drafted if verdict.path else len(path)
                proposal, request = proposal.along(path), request.along(path)
            round_ = self._advance(checked_of(verdict, proposal), proposal, request, num_drafted)
            answered = True
            if await self._begin_next(round_, request, verdict, begun):
                self._kept.append(round_)
            else:
                yield round_
        if not answered:
            if staging is not None:
                await staging.close()
            self._next.begin()  # the target was lost; continue from here

    async def _hear(self, begun: VerifyRound) -> AsyncGenerator[RoundOutcome | None]:
        """Hear of a round that the target's head went on with: its drafts and their verdict."""
        since_ns = time.perf_counter_ns()
        verdict = await self._verifying.hear(begun.round_id)
        self._waiting_ns = time.perf_counter_ns() - since_ns
        proposal = request = None
        if verdict is not None and begun.head is not None:
            proposal = self._drafting.went_on(self._sequence.tokens, begun.head, verdict)
        wanted = max(self._next.turn.num_drafts, begun.head.max_tokens if begun.head else 0)
        limit = self._requests.draft_limit(0, wanted)
        if proposal is not None and len(proposal.token_ids) <= limit:
            request = self._head_rounds.as_begun(self._requests.request(proposal))
        if verdict is None or proposal is None or request is None:
            # The target was lost, or another round has to be sent by now.
            self._head_rounds.begun = None
            self._verifying.keep(len(self._sequence))
            self._next.begin()
            return
        num_drafted = len(proposal.token_ids)
        round_ = self._advance(checked_of(verdict, proposal), proposal, request, num_drafted)
        if await self._begin_next(round_, request, verdict):
            self._kept.append(round_)
        else:
            yield round_

    async def _verdicts(
        self, request: VerifyRound, distributions: Sequence[TokenDistribution] = ()
    ) -> AsyncGenerator[Verdict | None]:
        """Yield what `Verifying.check` does, and take the time that it takes."""
        self._waiting_ns, self._asked_ns = 0, time.perf_counter_ns()
        since_ns = self._asked_ns
        async for verdict in self._verifying.check(self._sequence, request, distributions):
            self._waiting_ns += time.perf_counter_ns() - since_ns
            yield verdict
            since_ns = time.perf_counter_ns()
            if verdict is not None:
                self._waiting_ns = 0

    async def _begin_next(
        self,
        round_: RoundOutcome,
        request: VerifyRound,
        verdict: Verdict,
        begun: Begun | None = None,
    ) -> bool:
        """Begin the next round after a verdict; return whether this one can be kept back."""
        asked = False
        if not self._goes_on(request, verdict):
            self._next.heard(request.head, verdict)
            if asked := self._next.begin(begun):
                await asyncio.sleep(0)  # send the request before counting the round
        self._count(round_)
        return asked and self._can_wait(round_)

    def _goes_on(self, request: VerifyRound, verdict: Verdict) -> bool:
        """Whether the target's head goes on with the next round, and is still to be the drafter."""
        begun = self._head_rounds.heard(request, verdict)
        if begun is None or begun.head is None:
            return False
        if not (self._pace.turn().num_drafts and self._drafting.still_heads(begun.head)):
            self._head_rounds.begun = None
            return False
        self._next.goes_on()
        return True

    async def _decode(self) -> AsyncGenerator[RoundOutcome | None]:
        """Decode without drafts until the drafter has a proposal worth verifying."""
        request = self._requests.allowing(NOTHING)
        if len(self._sequence) == self._prompt_length <= SHORT_PROMPT:
            self._next.follow()  # it may read the prompt while the target does
        async for verdict in self._verdicts(request):
            if verdict is None:
                yield None
                continue
            round_ = self._advance(checked_of(verdict, NOTHING), NOTHING, request)
            self._count(round_)
            if self._goes_on(request, verdict):
                yield round_
                return
            self._next.heard(request.head, verdict)
            self._next.follow()
            ends = verdict.last or self._next.is_wanted
            if ends and not self._next.is_there:
                self._next.begin()
                await asyncio.sleep(0)  # send the request before the caller works
            yield round_
            if ends:
                return
        self._next.begin()  # the target was lost midway; continue from here

    async def _fail_window(self, proposal: DraftChunk) -> AsyncGenerator[RoundOutcome | None]:
        """Fail the open window, since the drafter has no proposal."""
        yield None
        round_ = self._advance(NothingDrafted(), proposal)
        self._count(round_)
        self._pace.window_failed()
        self._next.begin()
        await asyncio.sleep(0)  # send the request before the caller works
        yield round_

    def _take_kept(self) -> list[RoundOutcome]:
        """Return and clear the rounds kept back.

        The caller needs about as long for a round as a small drafter for a proposal. Rounds are
        kept back so that it does this work while the target works, not while the drafter does.
        """
        kept, self._kept = self._kept, []
        return kept

    def _can_wait(self, round_: RoundOutcome) -> bool:
        """Whether a round can be kept back: output continues, with no stop strings or budget."""
        plan = self._plan
        if self._requests.remaining <= 0 or plan.stop or plan.has_budget:
            return False
        tokens = (t for c in round_.commands if isinstance(c, Commit) for t in c.tokens)
        return not any(token.token_id in self._eos for token in tokens)

    def _num_ahead(self) -> int:
        """Return how many proposals ahead the drafter is to make for staging."""
        return 0 if self._staging is None or self._pace.repeats else self._staging.num_proposals

    def _advance(
        self,
        event: Event,
        proposal: DraftChunk,
        request: VerifyRound | None = None,
        num_drafted: int = 0,
    ) -> RoundOutcome:
        """Apply an event to the state, as far as the next round depends on it; return the round.

        `num_drafted` are the drafts that the target has read, more than were judged of a tree.
        """
        start = len(self._sequence)
        verdict = event.verdict if isinstance(event, Checked) else None
        self._requests.state, commands = step(self._requests.state, event)
        for command in commands:
            self._carry_out(command)
        if self._phases is not None:
            self._phases.commit(self._sequence.tokens, self._requests.state.committed_length)
        now = time.perf_counter_ns()
        began_ns, self._next.began_ns = self._next.began_ns, now
        round_ns = now - began_ns
        self._recoveries.output_token_index = len(self._sequence) - self._prompt_length
        if verdict is not None:
            emitted = len(self._sequence) - start
            if self._prediction is not None and proposal.drafter == PREDICTION:
                self._prediction.checked(verdict)
            asked_head = request is not None and request.head is not None
            self._pace.checked(
                CheckedRound(proposal, verdict, emitted, round_ns, num_drafted, asked_head)
            )
            if self._staging is not None and verdict.decisions:
                self._staging.ran(round_ns)
        return RoundOutcome(
            commands=commands,
            verdict=verdict,
            start=start,
            committed_length=self._requests.state.committed_length,
            round_ns=round_ns,
            request=request,
            proposal=proposal,
            num_drafted=num_drafted,
            round_id=request.round_id if request else self._next.round_id,
            began_ns=began_ns,
            drafting_ns=max(0, self._next.drafted_ns - began_ns),
            verifying_ns=now - max(self._asked_ns, began_ns),
            waiting_ns=self._waiting_ns,
        )

    def _count(self, round_: RoundOutcome) -> None:
        """Do the bookkeeping for a round, which may overlap with drafting."""
        self._requests.watch(round_.commands)
        verdict, proposal = round_.verdict, round_.proposal
        if verdict is not None and verdict.decisions:
            emitted = len(self._sequence) - round_.start
            drafted, accepted = round_.num_drafted, verdict.num_accepted
            self._drafting.record(proposal.drafter, drafted, accepted, emitted, round_.round_ns)

    def _carry_out(self, command: Command) -> None:
        """Apply a command to the sequence; the caller applies it to the text."""
        if isinstance(command, Extend):
            self._sequence.extend(command.token_ids)
        elif isinstance(command, RollBack):
            self._sequence.keep(command.length)
            self._drafting.keep(command.length)
            self._verifying.keep(command.length)
            if self._prediction is not None:
                self._prediction.keep(command.length - self._prompt_length)
            self._sequence.extend([command.token_id])
            self._requests.cut(command.length)

    def loop_guard_index(self, num_tokens: int) -> int | None:
        """Return the output index from which the loop guard forced exact acceptance, if it did."""
        return self._requests.loop_guard_index(num_tokens)
