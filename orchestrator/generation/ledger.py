"""A generation's accounting: token origins, acceptance, loss, and where the time went."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flyspec.values.generation import (
    DrafterShare,
    GenerationTimings,
    Recovery,
    RecoveryKind,
    RoundRecord,
    SpeculationMetrics,
)
from flyspec.values.rounds import Budget, DraftChunk, OpenWindow, Outcome, Verdict, VerifyRound
from flyspec.values.tokens import Origin
from orchestrator.generation.phases import Phases
from orchestrator.generation.window import Command, RollBack, Token

NOTHING = DraftChunk()
"""The proposal of a round that is to decode without drafts."""
MAX_RECOVERIES, MAX_REASON_CHARACTERS = 64, 300


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """The outcome of a round: of verifying a proposal, or of decoding without drafts.

    `start` is the sequence's length before the round, `committed_length` its final part after it.
    Without a verdict, a window failed for lack of a proposal and nothing was verified. `request` is
    the request without its prefix; `proposal` may be empty; of a tree, both have the judged path
    only, and `num_drafted` are all drafts that the target has read. `began_ns` is on the
    `perf_counter_ns` clock. `drafting_ns` passed until the proposal was there, or no longer waited
    for; `verifying_ns` since the verdict was asked for, of which `waiting_ns` were for it alone.
    """

    commands: Sequence[Command]
    verdict: Verdict | None
    start: int
    committed_length: int
    round_ns: int
    request: VerifyRound | None = None
    proposal: DraftChunk = NOTHING
    num_drafted: int = 0
    round_id: int = 0
    began_ns: int = 0
    drafting_ns: int = 0
    verifying_ns: int = 0
    waiting_ns: int = 0

    @property
    def record(self) -> RoundRecord:
        asked, verdict = self.request or VerifyRound(0, 0, (), ()), self.verdict
        if verdict is None:  # a window failed for lack of drafts
            (back,) = (c for c in self.commands if isinstance(c, RollBack))
            verdict = Verdict(back.length, back.token_id)
        return RoundRecord(
            start_length=self.start,
            drafter=self.proposal.drafter,
            draft_token_ids=asked.draft_token_ids[: len(verdict.decisions)],
            decisions=verdict.decisions,
            keep_length=verdict.keep_length,
            next_token_id=verdict.next_token_id,
            committed_length=self.committed_length,
            budget=asked.budget,
            exact_until_position=asked.exact_until_position,
            open_window=asked.open_window,
            num_speculative_tokens=asked.num_speculative_tokens,
            rule_segments=asked.rule_segments,
            draft_origins=self.proposal.origins[: len(verdict.decisions)],
            plain_token_ids=verdict.plain_token_ids,
            draft_distributions=self.proposal.distributions[: len(verdict.decisions)],
        )


class Recoveries:
    """Failures a generation recovered from: counts all, keeps the first, calls `listener`.

    `output_token_index` is updated by `Rounds`.
    """

    def __init__(self, listener: Callable[[Recovery], None] = lambda _: None) -> None:
        self._began_ns = time.perf_counter_ns()
        self._listener = listener
        self.output_token_index = self.count = 0
        self.kept: list[Recovery] = []

    def note(self, kind: RecoveryKind, since_ns: int, successor: str, reason: object) -> None:
        """Record recovery from a failure noticed at `since_ns` (`perf_counter_ns`)."""
        self.count += 1
        now = time.perf_counter_ns()
        recovery = Recovery(
            kind,
            self.output_token_index,
            now - self._began_ns,
            now - since_ns,
            successor,
            str(reason)[:MAX_REASON_CHARACTERS],
        )
        if len(self.kept) < MAX_RECOVERIES:
            self.kept.append(recovery)
        self._listener(recovery)


@dataclass(slots=True)
class Ledger:
    """The counts of one generation and the times of its rounds; `finish` completes them.

    Drafts beyond the output's end do not count. `phases` have budgets of their own, besides what is
    `allowed` in all. The other `timings` are filled in by the caller. `arrived_ns` is when the
    request arrived, on the `perf_counter_ns` clock.
    """

    allowed: Budget = field(default_factory=Budget)
    phases: Phases | None = None
    recoveries: Recoveries = field(default_factory=Recoveries)
    arrived_ns: int = field(default_factory=time.perf_counter_ns)
    metrics: SpeculationMetrics = field(default_factory=SpeculationMetrics)
    timings: GenerationTimings = field(default_factory=GenerationTimings)
    num_draft_tokens_per_round: list[int] = field(default_factory=list)
    _opened: bool = False
    _shares: dict[str, DrafterShare] = field(default_factory=dict)
    _plain: bool = False
    _committed_length: int = 0
    _end: float = math.inf
    _unsettled: list[tuple[int, int, str]] = field(default_factory=list)
    """Start, accepted drafts and drafter of rounds that an open window may still cut short."""
    _settled: list[tuple[str, int]] = field(default_factory=list)
    _overheads_ns: list[int] = field(default_factory=list)

    def budget(self, window: OpenWindow | None) -> Budget:
        """Return the remaining budget for loose tokens, minus the token of an open window."""
        left = self.allowed.less(self.metrics.num_loose_tokens, self.metrics.loose_cost_nats)
        return left.less(1, window.gap_nats) if window else left

    @property
    def shares(self) -> list[DrafterShare]:
        """The drafters' shares of the generation, in order of first use."""
        return list(self._shares.values())

    def record(self, round_: RoundOutcome, final: Sequence[Token], end: float = math.inf) -> None:
        """Count a round after which the tokens `final` became final.

        `end` is the sequence's length at the output's end, if this is the last round.
        """
        self._end = end
        metrics, verdict, timings = self.metrics, round_.verdict, self.timings
        timings.draft_model_ns += round_.proposal.timings.model_ns
        if not self._opened and verdict is not None:
            self._opened = True
            timings.opening_ns = round_.began_ns + round_.round_ns - self.arrived_ns
            timings.opening_draft_model_ns += round_.proposal.timings.model_ns
            timings.opening_target_model_ns = verdict.timings.forward_ns
        self._committed_length = round_.committed_length
        for token in final:
            if token.origin is Origin.LOOSE:
                metrics.num_loose_tokens += 1
                metrics.loose_cost_nats += token.gap_nats or 0.0
        if self.phases is not None:
            self.phases.spend(final)
        if verdict is not None:
            self._record_verdict(round_, verdict)
        else:
            self.num_draft_tokens_per_round.append(0)
        for command in round_.commands:
            if isinstance(command, RollBack):  # the window's token and all after it are rejected
                metrics.num_rollbacks += 1
                if command.length < self._end:
                    self._reject(command.gap_nats)
                self._settle_at(command.length)
        if self._unsettled:
            self._settle(self._committed_length)

    def _record_verdict(self, round_: RoundOutcome, verdict: Verdict) -> None:
        """Count the verified drafts, the rejected one, and the round's time outside the models."""
        metrics = self.metrics
        self.timings.target_model_ns += verdict.timings.forward_ns
        self.timings.judge_ns += verdict.timings.judge_ns
        plain, self._plain = self._plain, not verdict.decisions
        room = max(0, self._end - round_.start)
        if not verdict.decisions:
            count = int(min(1 + len(verdict.plain_token_ids), room))
            metrics.num_rounds += count
            metrics.num_plain_tokens += count
            metrics.num_plain_bursts += not plain
            self.num_draft_tokens_per_round += [0] * count
            return
        metrics.num_rounds += 1
        num_drafted = max(round_.num_drafted, len(verdict.decisions))
        self.num_draft_tokens_per_round.append(num_drafted)
        num_drafts, drafter = int(min(len(verdict.decisions), room)), round_.proposal.drafter
        if num_drafted == len(verdict.decisions):
            num_drafted = num_drafts
        metrics.count(num_drafted, 0)
        self._share(drafter).count(num_drafted, 0)
        for decision in verdict.decisions[:num_drafts]:
            if decision.outcome is Outcome.REJECTED and decision.gap_nats is not None:
                self._reject(decision.gap_nats)
        self._unsettled.append((round_.start, min(verdict.num_accepted, num_drafts), drafter))
        if metrics.num_spec_steps > 1:  # the first also opens sessions and reads the prompt
            models_ns = verdict.timings.forward_ns
            if not round_.proposal.ahead:  # else it was drafted during another forward pass
                models_ns += round_.proposal.timings.model_ns
            # A head drafted in the round before, which may have taken longer than this one.
            self._overheads_ns.append(max(0, round_.round_ns - models_ns))

    def followed(self, proposal: DraftChunk) -> None:
        """Count a proposal by a drafter following plain decoding, and its agreements."""
        self.timings.draft_model_ns += proposal.timings.model_ns
        if not self._opened:
            self.timings.opening_draft_model_ns += proposal.timings.model_ns
        self.metrics.num_scored_tokens += len(proposal.agreements)
        self.metrics.num_agreed_tokens += sum(proposal.agreements)

    def _share(self, drafter: str) -> DrafterShare:
        return self._shares.setdefault(drafter, DrafterShare(drafter=drafter))

    def _reject(self, gap_nats: float) -> None:
        self.metrics.num_rejected_tokens += 1
        self.metrics.rejected_cost_nats += gap_nats

    def finish(self) -> None:
        """Complete the counts; tokens after a window that is still open are not accepted."""
        self._settle_at(int(min(self._committed_length, self._end)))
        if self._overheads_ns:
            self.timings.round_overhead_p50_ns = int(statistics.median(self._overheads_ns))

    def _settle_at(self, length: int) -> None:
        """Cut accepted drafts at position `length`, and count the rest for every round."""
        self._unsettled = [(s, max(0, min(n, length - s)), d) for s, n, d in self._unsettled]
        self._settle(math.inf)

    def _settle(self, committed_length: float) -> None:
        """Count the accepted drafts of rounds that are entirely final."""
        settled = 0
        for start, accepted, drafter in self._unsettled:
            if start + accepted > committed_length:
                break
            self.metrics.settle(accepted)
            self._share(drafter).num_accepted_draft_tokens += accepted
            self._settled.append((drafter, accepted))
            settled += 1
        del self._unsettled[:settled]

    def take_settled(self) -> list[tuple[str, int]]:
        """Return drafter and accepted drafts of the rounds that became final since the last call.

        These are what `num_accepted_draft_tokens` and `acceptance_histogram` count.
        """
        taken, self._settled = self._settled, []
        return taken
