"""Criteria: what must hold at a position for its draft to be accepted. One per file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flyspec.engine.distributions import Distributions


@dataclass(frozen=True)
class Evidence:
    """The input of criteria: n consecutive positions of a round, each with a drafted token.

    `raw` and `processed` are the target's logits [n, V], the model's own and those sampled from;
    `drafts` are the drafted tokens; `first_position` is absolute; `draft` holds the drafter's
    distributions, n rows, if known.
    """

    raw: Tensor
    processed: Tensor
    drafts: Sequence[int]
    first_position: int
    seed: int
    draft: Distributions | None = None

    @cached_property
    def token_ids(self) -> Tensor:
        """The drafted tokens, int64 [n]."""
        return torch.tensor(self.drafts, dtype=torch.int64, device=self.raw.device)

    @property
    def positions(self) -> range:
        return range(self.first_position, self.first_position + len(self.drafts))


class Criterion(ABC):
    """A test of one position, on numbers measured there."""

    entropy = False
    """Whether the first number is an entropy, reported under that name in verdicts."""
    judges_matches = False
    """Whether drafts that equal the target's own token must pass, too."""

    @property
    def never(self) -> bool:
        """Whether nothing is accepted, so that nothing has to be measured."""
        return False

    @property
    def always(self) -> bool:
        """Whether everything is accepted, so that nothing has to be measured."""
        return False

    @abstractmethod
    def measure(self, at: Evidence) -> Tensor:
        """Return each position's numbers, on the logits' device: [n, numbers], main one first."""

    @abstractmethod
    def accepts(self, *numbers: float) -> bool:
        """Return whether a drafted token with these numbers may be accepted."""


@dataclass(frozen=True, slots=True)
class Constant(Criterion):
    """The same answer at every mismatch.

    `Constant(False)` is exact speculative decoding: only the target's own tokens are accepted.
    `Constant(True)` is an open gate, for a rule that relies on its window alone.
    """

    answer: bool

    @property
    def never(self) -> bool:
        return not self.answer

    @property
    def always(self) -> bool:
        return self.answer

    def measure(self, at: Evidence) -> Tensor:
        return at.raw.new_zeros(at.raw.shape[0], 1)

    def accepts(self, *numbers: float) -> bool:
        return self.answer
