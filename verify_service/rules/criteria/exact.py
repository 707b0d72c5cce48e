"""Criteria that need no measurement: no mismatch stands, or each does."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Constant:
    """The same answer at every mismatch.

    `Constant(False)` is exact speculative decoding: only the target's own tokens stand.
    `Constant(True)` is an open gate, for a rule that relies on its window alone.
    """

    answer: bool
    raw: bool = False

    @property
    def never(self) -> bool:
        """Whether no mismatch stands."""
        return not self.answer

    @property
    def always(self) -> bool:
        """Whether each mismatch stands."""
        return self.answer

    def measure(self, logits: Tensor) -> Tensor:
        """Zeros; nobody needs them."""
        return logits.new_zeros(logits.shape[0])

    def accepts(self, value: float) -> bool:
        """The constant answer."""
        return self.answer
