"""Criteria: what must hold at a position itself for a draft to stand there. One a file."""

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
    """What criteria may look at: n consecutive positions of a round, each with a drafted token.

    `raw` and `processed` are the target's logits [n, V], the model's own and those that it samples
    from; `drafts` the drafted tokens; `first_position` is absolute; `draft` holds the drafter's
    distributions, n rows, if they are known.
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
        """Absolute positions of the rows."""
        return range(self.first_position, self.first_position + len(self.drafts))


class Criterion(ABC):
    """A test of one position on numbers measured there."""

    entropy = False
    """Whether the first number is an entropy; a verdict tells it under that name."""
    judges_matches = False
    """Whether a drafted token that is the target's own must pass it too."""

    @property
    def never(self) -> bool:
        """Accepts nothing, so nothing has to be measured."""
        return False

    @property
    def always(self) -> bool:
        """Accepts everything, so nothing has to be measured."""
        return False

    @abstractmethod
    def measure(self, at: Evidence) -> Tensor:
        """The numbers at each position, on the logits' device: [n, numbers], the main one first."""

    @abstractmethod
    def accepts(self, *numbers: float) -> bool:
        """Whether a drafted token with these numbers may stand."""


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
