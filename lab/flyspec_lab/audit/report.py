"""Findings of an audit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class DiscrepancyKind(StrEnum):
    """Kinds of what does not follow, the most telling first."""

    TOKEN = "token"
    """The target's own token, with this seed and sampling, is another."""
    DECISION = "decision"
    """The rule decides otherwise on a drafted token."""
    RECORD = "record"
    """The recording contradicts itself, whatever the target."""
    NUMBER = "number"
    """A log-probability, gap, entropy or other measure is not the target's."""


class Reason(StrEnum):
    """The likely reason, in the words of the report."""

    ALTERED = "altered text: the recorded token is not what the rounds, or the target, give there"
    OTHER_RULE = "another rule, or other parameters: tokens and numbers agree, a decision does not"
    OTHER_SEED = "another seed or other sampling: numbers agree, but many tokens are not drawn"
    OTHER_WEIGHTS = "other weights, such as a quantised target: many numbers differ"
    ALTERED_NUMBER = "an altered number: tokens and other numbers agree"
    INCONSISTENT = "an altered recording: it contradicts itself"


@dataclass(frozen=True)
class Discrepancy:
    """The first thing that does not follow, at output token `token_index` (from 0).

    `round_index` is the round's, from 0; None if the output is to blame, not a round.
    """

    kind: DiscrepancyKind
    token_index: int
    recorded: str
    expected: str
    round_index: int | None = None


@dataclass(frozen=True)
class AuditReport:
    """The verdict on one recording.

    `follows`: the text follows from the target, rule, seed and drafts; up to rounding of at most
    `tolerance_nats` unless that is 0. `discrepancy` is the first one, `reason` the likely reason.
    `num_differing` of `num_numbers` recorded numbers differ by more than is allowed at their
    positions, the largest of all by `largest_difference_nats`. `num_ties` tokens or decisions
    follow only within rounding. `notes` say what the server said of itself that the target is not.
    """

    where: str
    follows: bool
    num_tokens: int
    num_rounds: int
    rule: str
    seed: int
    discrepancy: Discrepancy | None
    reason: Reason | None
    num_numbers: int
    num_differing: int
    largest_difference_nats: float
    tolerance_nats: float
    num_ties: int
    notes: Sequence[str]

    def __str__(self) -> str:
        found = self.discrepancy
        if found is None:
            return f"{self.where}: follows"
        return (
            f"{self.where}: does not follow from token {found.token_index} on: recorded "
            f"{found.recorded}, expected {found.expected}; likely: {self.reason}"
        )
