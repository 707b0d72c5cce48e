"""What a generation accounts for: origins, acceptance, loss, bytes, and where the time went."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from flyspec.values.generation import RoundRecord, SpeculationMetrics
from flyspec.values.rounds import (
    Budget,
    DraftTimings,
    OpenWindow,
    Outcome,
    Verdict,
    VerifyRound,
)
from flyspec.values.tokens import Origin
from orchestrator.generation.window import Command, RollBack, Token
from orchestrator.upstreams.protocol import Traffic


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """One checked proposal, or one plain token: what followed from it and what it took.

    `start` is the sequence's length before it, `committed_length` the final part after it. Without
    a verdict, a window failed for want of a proposal and nothing was checked. `request` is what was
    asked, without its prefix; `drafter` the name of who drafted, empty if nobody did. It began at
    `began_ns` and had its proposal at `drafted_ns`, as `perf_counter_ns` counts.
    """

    commands: Sequence[Command]
    verdict: Verdict | None
    start: int
    committed_length: int
    round_ns: int
    request: VerifyRound | None = None
    drafter: str = ""
    round_id: int = 0
    began_ns: int = 0
    drafted_ns: int = 0
    draft_timings: DraftTimings = field(default_factory=DraftTimings)

    @property
    def record(self) -> RoundRecord:
        """The round as clients are told of it, with all that its verdict depended on."""
        asked, verdict = self.request or VerifyRound(0, 0, (), ()), self.verdict
        if verdict is None:  # a window failed for want of drafts
            (back,) = (c for c in self.commands if isinstance(c, RollBack))
            verdict = Verdict(back.length, back.token_id)
        return RoundRecord(
            start_length=self.start,
            drafter=self.drafter,
            draft_token_ids=asked.draft_token_ids,
            decisions=verdict.decisions,
            keep_length=verdict.keep_length,
            next_token_id=verdict.next_token_id,
            committed_length=self.committed_length,
            budget=asked.budget,
            exact_until_position=asked.exact_until_position,
            open_window=asked.open_window,
        )


@dataclass(slots=True)
class Ledger:
    """Counts of one generation.

    Loose tokens and their cost in nats count once they are final, accepted drafts of a round once
    no window can drop them; `finish` counts those of the last rounds.
    """

    max_loose_tokens: int | None = None
    max_loose_cost_nats: float | None = None
    traffic: Traffic = field(default_factory=Traffic)
    num_rounds: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_loose_tokens: int = 0
    loose_cost_nats: float = 0.0
    num_rejected_tokens: int = 0
    rejected_cost_nats: float = 0.0
    num_rollbacks: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    draft_model_ns: int = 0
    target_model_ns: int = 0
    _committed_length: int = 0
    _unsettled: list[tuple[int, int, str]] = field(default_factory=list)
    """Start, accepted drafts and drafter of the rounds that an open window can still shorten."""
    _settled: list[tuple[str, int]] = field(default_factory=list)
    _overheads_ns: list[int] = field(default_factory=list)

    def budget(self, window: OpenWindow | None) -> Budget:
        """What may still be accepted loosely; the token of an open window has its share."""
        tokens, cost = self.max_loose_tokens, self.max_loose_cost_nats
        if tokens is not None:
            tokens = max(0, tokens - self.num_loose_tokens - (window is not None))
        if cost is not None:
            reserved = window.gap_nats if window else 0.0
            cost = max(0.0, cost - self.loose_cost_nats - reserved)
        return Budget(tokens, cost)

    def record(self, round_: RoundOutcome, final: Sequence[Token]) -> None:
        """Count a round that made the tokens `final` a final part of the output.

        The part of a round's time that is outside both models is its overhead.
        """
        verdict = round_.verdict
        self.draft_model_ns += round_.draft_timings.model_ns
        self._committed_length = round_.committed_length
        for token in final:
            if token.origin is Origin.LOOSE:
                self.num_loose_tokens += 1
                self.loose_cost_nats += token.gap_nats or 0.0
        if verdict is not None:
            self._record_verdict(round_, verdict)
        for command in round_.commands:
            if isinstance(command, RollBack):
                self._roll_back(command)
        if self._unsettled:
            self._settle(self._committed_length)

    def _record_verdict(self, round_: RoundOutcome, verdict: Verdict) -> None:
        """Count what was checked, and the draft that was rejected."""
        self.num_rounds += 1
        self.target_model_ns += verdict.timings.forward_ns
        if not verdict.decisions:
            return
        self.num_spec_steps += 1
        self.num_draft_tokens += len(verdict.decisions)
        for decision in verdict.decisions:
            if decision.outcome is Outcome.REJECTED and decision.gap_nats is not None:
                self._reject(decision.gap_nats)
        accepted = verdict.num_accepted
        self._unsettled.append((round_.start, accepted, round_.drafter))
        if self.num_spec_steps > 1:  # the first round also opens sessions and reads the prompt
            models_ns = round_.draft_timings.model_ns + verdict.timings.forward_ns
            self._overheads_ns.append(round_.round_ns - models_ns)

    def _reject(self, gap_nats: float) -> None:
        self.num_rejected_tokens += 1
        self.rejected_cost_nats += gap_nats

    def _roll_back(self, command: RollBack) -> None:
        """Count a window that failed after its round; what follows its token does not stand."""
        self.num_rollbacks += 1
        self._reject(command.gap_nats)
        self._settle_at(command.length)

    def finish(self) -> None:
        """The output is complete: of what follows a window still open, nothing stands."""
        self._settle_at(self._committed_length)

    def _settle_at(self, length: int) -> None:
        """No token from position `length` on stands; count what does, of every round."""
        self._unsettled = [(s, max(0, min(n, length - s)), d) for s, n, d in self._unsettled]
        self._settle(math.inf)

    def _settle(self, committed_length: float) -> None:
        """Count the accepted drafts of rounds that are final as a whole."""
        settled = 0
        for start, accepted, drafter in self._unsettled:
            if start + accepted > committed_length:
                break
            missing = accepted + 1 - len(self.acceptance_histogram)
            self.acceptance_histogram += [0] * missing
            self.acceptance_histogram[accepted] += 1
            self.num_accepted_draft_tokens += accepted
            self._settled.append((drafter, accepted))
            settled += 1
        del self._unsettled[:settled]

    def take_settled(self) -> list[tuple[str, int]]:
        """Drafter and accepted drafts of the rounds that became final since they were last taken.

        What `num_accepted_draft_tokens` and `acceptance_histogram` count.
        """
        taken, self._settled = self._settled, []
        return taken

    @property
    def round_overhead_p50_ns(self) -> int:
        """Median time of a round outside the two models, ns; 0 with fewer than two rounds."""
        return int(statistics.median(self._overheads_ns)) if self._overheads_ns else 0

    @property
    def speculation(self) -> SpeculationMetrics:
        """The counts as clients are told of them."""
        return SpeculationMetrics(
            num_spec_steps=self.num_spec_steps,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_draft_tokens=self.num_accepted_draft_tokens,
            num_loose_tokens=self.num_loose_tokens,
            loose_cost_nats=self.loose_cost_nats,
            num_rollbacks=self.num_rollbacks,
            acceptance_histogram=self.acceptance_histogram,
            num_rounds=self.num_rounds,
            num_rejected_tokens=self.num_rejected_tokens,
            rejected_cost_nats=self.rejected_cost_nats,
            round_bytes=self.traffic.round_bytes,
            distribution_bytes=self.traffic.distribution_bytes,
        )
