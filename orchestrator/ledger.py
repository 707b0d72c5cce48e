"""What a generation accounts for: origins, acceptance, loss, and where the time went."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from flyspec.types import Budget, Origin, Outcome, RoundVerdict


@dataclass(frozen=True, slots=True)
class Round:
    """One checked proposal, or one plain token: what became final and what it took."""

    token_ids: list[int]
    origins: list[Origin]
    verdict: RoundVerdict
    draft_model_ns: int
    round_ns: int

    @property
    def num_accepted(self) -> int:
        """Drafted tokens that stand."""
        return len(self.token_ids) - 1


def origins_of(
    verdict: RoundVerdict, draft_origins: Sequence[Origin], num_accepted: int
) -> list[Origin]:
    """Origins of the accepted drafts and of the token that follows them."""
    origins = [
        Origin.LOOSE if decision.outcome is Outcome.LOOSE else origin
        for decision, origin in zip(verdict.decisions, draft_origins, strict=True)
    ][:num_accepted]
    if not draft_origins:
        last = Origin.PLAIN
    elif any(d.outcome is Outcome.REJECTED for d in verdict.decisions):
        last = Origin.CORRECTION
    else:
        last = Origin.BONUS
    return [*origins, last]


@dataclass(slots=True)
class Ledger:
    """Counts of one generation; loose tokens and their cost in nats count at commit."""

    max_loose_tokens: int | None = None
    max_loose_cost_nats: float | None = None
    num_rounds: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_loose_tokens: int = 0
    loose_cost_nats: float = 0.0
    num_rollbacks: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    draft_model_ns: int = 0
    target_model_ns: int = 0
    _overheads_ns: list[int] = field(default_factory=list)

    def budget(self) -> Budget:
        """What may still be accepted loosely."""
        tokens, cost = self.max_loose_tokens, self.max_loose_cost_nats
        return Budget(
            None if tokens is None else max(0, tokens - self.num_loose_tokens),
            None if cost is None else max(0.0, cost - self.loose_cost_nats),
        )

    def record(self, round_: Round, num_emitted: int) -> None:
        """Count a round of which `num_emitted` tokens reached the output.

        The part of a round's time that is outside both models is its overhead.
        """
        verdict, num_accepted = round_.verdict, round_.num_accepted
        self.num_rounds += 1
        self.draft_model_ns += round_.draft_model_ns
        self.target_model_ns += verdict.timings.forward_ns
        drafted = len(verdict.decisions)
        if not drafted:
            return
        self.num_spec_steps += 1
        self.num_draft_tokens += drafted
        self.num_accepted_draft_tokens += num_accepted
        missing = num_accepted + 1 - len(self.acceptance_histogram)
        self.acceptance_histogram += [0] * missing
        self.acceptance_histogram[num_accepted] += 1
        for decision in verdict.decisions[:num_emitted]:
            if decision.outcome is Outcome.LOOSE:
                self.num_loose_tokens += 1
                self.loose_cost_nats += decision.gap_nats or 0.0
        if self.num_spec_steps > 1:  # the first round also opens sessions and reads the prompt
            models_ns = round_.draft_model_ns + verdict.timings.forward_ns
            self._overheads_ns.append(round_.round_ns - models_ns)

    @property
    def round_overhead_p50_ns(self) -> int:
        """Median time of a round outside the two models, ns; 0 with fewer than two rounds."""
        return int(statistics.median(self._overheads_ns)) if self._overheads_ns else 0
