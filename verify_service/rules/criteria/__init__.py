"""Criteria: what must hold at a mismatch itself for it to be accepted loosely. One a file."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Criterion(Protocol):
    """A test of one mismatch on a number measured at its position."""

    @property
    def never(self) -> bool:
        """Accepts no mismatch, so nothing has to be measured."""

    @property
    def always(self) -> bool:
        """Accepts every mismatch, so nothing has to be measured."""

    @property
    def raw(self) -> bool:
        """Measured on the model's own logits instead of the processed ones."""

    def measure(self, logits: Tensor) -> Tensor:
        """The number for each row of logits [rows, V], on their device: [rows]."""

    def accepts(self, value: float) -> bool:
        """Whether a mismatch with this number may stand."""
