"""Criteria that need no measurement: no mismatch stands, or each does."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from verify_service.rules.criteria import Criterion, Evidence


@dataclass(frozen=True, slots=True)
class Constant(Criterion):
    """The same answer at every mismatch.

    `Constant(False)` is exact speculative decoding: only the target's own tokens stand.
    `Constant(True)` is an open gate, for a rule that relies on its window alone.
    """

    answer: bool

    @property
    def never(self) -> bool:
        """Whether no mismatch stands."""
        return not self.answer

    @property
    def always(self) -> bool:
        """Whether each mismatch stands."""
        return self.answer

    def measure(self, at: Evidence) -> Tensor:
        """Zeros; nobody needs them."""
        return at.raw.new_zeros(at.raw.shape[0], 1)

    def accepts(self, *numbers: float) -> bool:
        """The constant answer."""
        return self.answer
