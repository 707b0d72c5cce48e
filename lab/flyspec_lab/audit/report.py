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

    `round_index` is the round's, from 0; None if the output is to blame, not a round. `token_text`
    is the recorded token's.
    """

    kind: DiscrepancyKind
    token_index: int
    recorded: str
    expected: str
    round_index: int | None = None
    token_text: str = ""


@dataclass(frozen=True)
class AuditReport:
    """The verdict on one recording.

    `follows`: the text follows from the target, rule, seed and drafts; up to rounding of at most
    `tolerance_nats` unless that is 0. `discrepancy` is the first one, `reason` the likely reason.
    `num_differing` of `num_numbers` recorded numbers differ by more than is allowed at their
    positions, the largest of all by `largest_difference_nats`. `num_ties` tokens or decisions
    follow only within rounding. `p_value` is the chance that rounding alone makes the recorded
    numbers differ as they do (None: not measured). `weights_agree` and `numerics_agree` compare
    what the server said of itself.
    """

    where: str
    follows: bool
    num_tokens: int
    num_rounds: int
    rule: str
    seed: int
    discrepancy: Discrepancy | None = None
    reason: Reason | None = None
    num_numbers: int = 0
    num_differing: int = 0
    largest_difference_nats: float = 0.0
    tolerance_nats: float = 0.0
    num_ties: int = 0
    p_value: float | None = None
    weights_agree: bool = True
    numerics_agree: bool = True
    notes: Sequence[str] = ()

    def lines(self) -> list[str]:
        """Return it in words; the first line is the verdict."""
        what = f"{self.num_tokens} tokens in {self.num_rounds} rounds, rule {self.rule}"
        if self.follows:
            first = f"{self.where}: follows ({what})"
        elif self.discrepancy is None:
            first = f"{self.where}: does not follow ({what})"
        else:
            found = self.discrepancy
            at = f"token {found.token_index}"
            if found.token_text:
                at += f" {found.token_text!r}"
            first = f"{self.where}: does not follow from {at} on ({what})"
        lines = [first]
        if self.discrepancy is not None:
            lines += [
                f"recorded: {self.discrepancy.recorded}",
                f"expected: {self.discrepancy.expected}",
            ]
        if self.reason is not None:
            lines.append(f"likely: {self.reason}")
        lines.append(self._numbers())
        return [*lines, *self.notes]

    def _numbers(self) -> str:
        if not self.num_numbers:
            return "numbers: none recorded"
        allowed = f"within {self.tolerance_nats:.2g} nats" if self.tolerance_nats else "to the bit"
        text = (
            f"numbers: {self.num_numbers - self.num_differing} of {self.num_numbers} agree "
            f"{allowed}, largest difference {self.largest_difference_nats:.2g}"
        )
        if self.p_value is not None:
            text += f"; chance of such differences by rounding alone {self.p_value:.2g}"
        return f"{text}; {self.num_ties} near-ties" if self.num_ties else text
