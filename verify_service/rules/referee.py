"""Decides on single drafted tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flyspec.values.rounds import Decision, Outcome
from verify_service.rules.criteria import Criterion
from verify_service.rules.guard import Guard, Purse
from verify_service.rules.inquiry import Observed, Round
from verify_service.rules.window import WindowWalk


@dataclass(frozen=True, slots=True)
class Referee:
    """Applies window, criterion, guard and budget position by position, cheapest test first.

    Indices before `exact_until`, those of bonus tokens, and everything once the purse is spent are
    judged exactly.
    """

    round: Round
    seen: Observed
    criterion: Criterion
    window: WindowWalk
    guard: Guard
    purse: Purse
    exact_until: int

    def decide(self, index: int) -> Decision:
        """Return EXACT, LOOSE (paid for, even if provisional) or REJECTED."""
        draft, own = self.round.drafts[index], self.seen.own[index]
        if draft == own and not self.criterion.judges_matches:
            return Decision(Outcome.EXACT, draft)
        exactly = index < self.exact_until or self.purse.spent or self.window.is_bonus(index)
        if draft == own or (self.seen.matches[index] and not exactly):
            return self._match(index, exactly)
        gap = self.seen.gap(index)
        if exactly or not self._may_be_loose(index, gap):
            return Decision(Outcome.REJECTED, own, gap_nats=gap)
        accepted, numbers = self._measure(index)
        if accepted:
            self.purse.pay(gap)
        outcome = Outcome.LOOSE if accepted else Outcome.REJECTED
        return self._decision(outcome, own, numbers, gap)

    def _match(self, index: int, exactly: bool) -> Decision:
        draft = self.round.drafts[index]
        if exactly or not self.criterion.judges_matches:
            return Decision(Outcome.EXACT, draft)
        accepted, numbers = self._measure(index)
        outcome = Outcome.EXACT if accepted else Outcome.REJECTED
        return self._decision(outcome, draft, numbers, None)

    def _may_be_loose(self, index: int, gap_nats: float) -> bool:
        return (
            not self.criterion.never
            and self.seen.possible(index)
            and self.guard.allows(self.round.drafts[index], self.seen.own[index])
            and self.purse.affords(gap_nats)
            and self.window.allows(index)
        )

    def _measure(self, index: int) -> tuple[bool, Sequence[float]]:
        if self.criterion.always:
            return True, ()
        numbers = self.seen.answers.numbers(self.criterion, index)
        return self.criterion.accepts(*numbers), numbers

    def _decision(
        self, outcome: Outcome, own: int, numbers: Sequence[float], gap_nats: float | None
    ) -> Decision:
        number = float(numbers[0]) if numbers else None
        if self.criterion.entropy:
            return Decision(outcome, own, entropy=number, gap_nats=gap_nats)
        return Decision(outcome, own, gap_nats=gap_nats, measure=number)
