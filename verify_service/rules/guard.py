"""Limits on loose acceptance regardless of the criterion: guarded tokens and budgets."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from flyspec.values.rounds import Budget


@dataclass(frozen=True, slots=True)
class Guard:
    """Control, EOS (stop tokens among them) and guarded tokens are never accepted loosely.

    Nor is any draft accepted in place of one that the target picks.
    """

    control_token_ids: Collection[int]
    eos_token_ids: Collection[int]
    guarded_token_ids: Collection[int] = ()

    def allows(self, draft_token_id: int, target_token_id: int) -> bool:
        return not (self._guards(draft_token_id) or self._guards(target_token_id))

    def _guards(self, token_id: int) -> bool:
        return (
            token_id in self.control_token_ids
            or token_id in self.eos_token_ids
            or token_id in self.guarded_token_ids
        )


class Purse:
    """The remaining budget while a round is judged; `within` is that of a larger part of it."""

    def __init__(self, budget: Budget, within: Purse | None = None) -> None:
        self._tokens = math.inf if budget.loose_tokens is None else budget.loose_tokens
        self._cost = math.inf if budget.loose_cost_nats is None else budget.loose_cost_nats
        self._within = within

    @property
    def spent(self) -> bool:
        """True if either limit is used up, so that the rest is judged exactly."""
        if self._within is not None and self._within.spent:
            return True
        return self._tokens <= 0 or self._cost <= 0.0

    def affords(self, cost_nats: float) -> bool:
        if self._within is not None and not self._within.affords(cost_nats):
            return False
        return not self.spent and cost_nats <= self._cost

    def pay(self, cost_nats: float) -> None:
        self._tokens -= 1
        self._cost -= cost_nats
        if self._within is not None:
            self._within.pay(cost_nats)
