"""Criteria: what must hold at a position itself for a draft to stand there. One a file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from flyspec.engine.distributions import Distributions


@dataclass(frozen=True, slots=True)
class Evidence:
    """What criteria may look at: n consecutive positions of a round, each with a drafted token.

    `raw` and `processed` are the target's logits [n, V], the model's own and those that it samples
    from; `token_ids` the drafted tokens, int64 [n]; `first_position` is absolute; `draft` holds the
    drafter's distributions, n rows, if they are known.
    """

    raw: Tensor
    processed: Tensor
    token_ids: Tensor
    first_position: int
    seed: int
    draft: Distributions | None = None

    def rows(self, start: int, stop: int) -> Evidence:
        """The positions from index `start` up to, not including, `stop`."""
        draft = self.draft
        if draft is not None:
            ids = draft.token_ids
            draft = Distributions(
                draft.log_probs[start:stop], None if ids is None else ids[start:stop]
            )
        return Evidence(
            self.raw[start:stop],
            self.processed[start:stop],
            self.token_ids[start:stop],
            self.first_position + start,
            self.seed,
            draft,
        )

    @property
    def positions(self) -> range:
        """Absolute positions of the rows."""
        return range(self.first_position, self.first_position + self.token_ids.shape[0])


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
