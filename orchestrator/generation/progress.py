"""The state of one generation, and the requests of the rounds that continue it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flyspec.prefix import TokenSequence
from flyspec.values.rounds import (
    Budget,
    DraftAhead,
    DraftChunk,
    RuleSegment,
    StagedOn,
    Verdict,
    VerifyRound,
)
from orchestrator.generation.drafting import Drafting
from orchestrator.generation.ledger import NOTHING, Ledger
from orchestrator.generation.loop_guard import LoopGuard
from orchestrator.generation.pace import NextRound, Pace
from orchestrator.generation.phases import Phases
from orchestrator.generation.plan import GenerationPlan
from orchestrator.generation.verifying import Verifying
from orchestrator.generation.window import Command, Commit, WindowState


@dataclass(slots=True)
class CurrentRound:
    """The round that comes next, or is with the target.

    `turn` is what the pace asks for. Every request to the drafter has its own, increasing
    `round_id`. `drafted_ns` is when its proposal arrived or the wait for it ended, which may have
    been before `began_ns`; its verdict was asked for at `asked_ns`, and waited for `waiting_ns`.
    `num_wanted` drafts were last requested, less those overtaken. `head_query`: drafts that the
    next plain token is to bring from a head, to learn how good they are. `self_started`: request
    and verdict of a round that the target has begun by itself. `num_ahead`: proposals ahead to ask
    the drafter for, so that rounds are staged; if it was, `stages`.
    """

    turn: NextRound
    round_id: int = 0
    began_ns: int = 0
    drafted_ns: int = 0
    asked_ns: int = 0
    waiting_ns: int = 0
    num_wanted: int = 0
    head_query: int = 0
    self_started: tuple[VerifyRound, Verdict] | None = None
    num_ahead: int = 0
    stages: bool = False

    def begin(self, round_id: int) -> None:
        self.round_id, self.began_ns = round_id, time.perf_counter_ns()

    def ahead(self, num_drafts: int) -> DraftAhead | None:
        """Return what to ask the drafter for besides this round's proposal."""
        self.stages = self.num_ahead > 0
        return DraftAhead(self.num_ahead, num_drafts) if self.stages else None


class Progress:
    """One generation: its plan and what carries it out, its `sequence` and window `state`."""

    def __init__(
        self,
        plan: GenerationPlan,
        pace: Pace,
        drafting: Drafting,
        verifying: Verifying,
        ledger: Ledger,
        phases: Phases | None = None,
    ) -> None:
        self.plan, self.pace, self.ledger, self.phases = plan, pace, ledger, phases
        self.drafting, self.verifying = drafting, verifying
        self.sequence = TokenSequence(plan.prompt_token_ids)
        self.prompt_length = length = len(plan.prompt_token_ids)
        self.state = WindowState(length, plan.max_total_tokens, plan.reporting.eager)
        self._last_id = 0
        self._loop_guard = LoopGuard() if plan.judging.loop_guard else None
        self._exact_from: int | None = None

    @property
    def remaining(self) -> int:
        return self.state.limit - len(self.sequence)

    def new_round_id(self) -> int:
        """Return an id for a message of a round, above all earlier ones."""
        self._last_id += 1
        return self._last_id

    def reserve(self, round_id: int) -> None:
        """Leave ids up to this one to rounds that the target begins by itself."""
        self._last_id = max(self._last_id, round_id)

    def draft_limit(self, num_more: int, wanted: int) -> int:
        """Return how many of `wanted` drafts are useful behind `num_more` tokens more than now.

        They have to fit the context, and there are none after the end of the output.

        With a token-exact rule, rounds near the end of the output draft no more than can still be
        emitted. Other rules do not cut rounds short: a verdict may depend on the drafts that
        follow, and the output should not depend on `max_tokens`. With windows across rounds it
        still does: a window open at the end of the output fails.
        """
        plan, window = self.plan, self.state.window
        remaining, length = self.remaining - num_more, len(self.sequence) + num_more
        if window is not None and plan.drafts.adaptive and not self.pace.repeats:
            wanted = max(wanted, window.remaining_matches)
        if remaining <= 0:
            return 0
        limit = min(wanted, plan.limits.context_length - length)
        exact = plan.judging.token_exact
        if self.phases is not None and window is None:
            exact = self.phases.exact_from_here
        return min(limit, remaining - 1) if exact else limit

    def request(self, round_: CurrentRound, proposal: DraftChunk) -> VerifyRound:
        """Return the request to verify a proposal, or to decode without one."""
        plan, window, plain = self.plan, self.state.window, 1
        if proposal is NOTHING:
            most = round_.turn.max_plain_tokens or plan.limits.max_plain_tokens
            if round_.head_query:
                most = 1
            plain = max(1, min(most, plan.limits.max_plain_tokens, self.remaining))
        exact = plan.judging.exact_until_position
        if self._exact_from is not None:
            exact = plan.limits.context_length
        segments: Sequence[RuleSegment] = ()
        if self.phases is not None and proposal.token_ids:
            segments = self.phases.segments(self.sequence.tokens, proposal.token_ids, window)
        # More drafts of a head are asked for where this K says nothing of the next one.
        wanted = plan.drafts.num_speculative_tokens
        if not (self.pace.repeats or round_.turn.max_plain_tokens == 1):
            wanted = round_.head_query or round_.turn.num_drafts
        head = self.drafting.head_request(self.draft_limit(1, wanted), round_.turn.min_confidence)
        return VerifyRound(
            round_id=round_.round_id,
            keep_length=0,
            append_token_ids=(),
            draft_token_ids=proposal.token_ids,
            max_plain_tokens=plain,
            budget=self.ledger.budget(window),
            exact_until_position=exact,
            open_window=window,
            draft_survivals=() if proposal.parents else self.pace.survivals(proposal),
            num_speculative_tokens=plan.judging.judged_k,
            num_top_tokens=self.drafting.num_top_tokens(proposal),
            rule_segments=segments,
            head=head,
            draft_parents=proposal.parents,
        )

    def staged_request(
        self, round_: CurrentRound, on: StagedOn, pushed: DraftChunk, behind: list[int]
    ) -> VerifyRound | None:
        """Return the round that verifies a proposal made ahead, `behind` more tokens than now.

        It is the one that would be sent then. None if there would be none, or maybe another one.
        """
        more = len(behind)
        limit = self.draft_limit(more, len(pushed.token_ids))
        if limit <= 0 or more >= self.remaining:
            return None
        if self._loop_guard is not None and self._exact_from is None:
            held = self.sequence.tokens[self.state.committed_length :]
            if self._loop_guard.would_trigger([*held, *behind]):
                return None
        return replace(
            self.request(round_, pushed.cut(0, limit)),
            round_id=self.new_round_id(),
            keep_length=on.keep_length + 1,
            prefix_hash=self.sequence.hash_with(behind),
            budget=Budget(),
            open_window=None,
            staged_on=on,
        )

    def cut(self, length: int, token_id: int) -> None:
        """Keep `length` tokens of the sequence, everywhere, and append one."""
        self.sequence.keep(length)
        self.drafting.keep(length)
        self.verifying.keep(length)
        self.sequence.extend([token_id])
        if self._exact_from is not None:
            self._exact_from = min(self._exact_from, length - self.prompt_length)

    def watch(self, commands: Sequence[Command]) -> None:
        """Require exact acceptance from here on once the final tokens loop.

        An open window runs its course.
        """
        guard = self._loop_guard
        if guard is None or self._exact_from is not None:
            return
        for command in commands:
            if isinstance(command, Commit):
                for token in command.tokens:
                    guard.push(token.token_id)
        if guard.token_index is not None:
            self._exact_from = len(self.sequence) - self.prompt_length

    def loop_guard_index(self, num_tokens: int) -> int | None:
        """Return the output index from which the loop guard forced exact acceptance.

        None if the first `num_tokens` output tokens did not trigger the guard.
        """
        guard = self._loop_guard
        if self._exact_from is None or guard is None or guard.token_index is None:
            return None
        if guard.token_index > num_tokens:
            return None
        return min(self._exact_from, num_tokens)
