"""Criteria: what must hold at a position for its draft to be accepted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flyspec.engine.distributions import Distributions
from flyspec.engine.sampling import Seed
from flyspec.engine.upload import upload


class Evidence:
    """The input of measures: n positions, each with a drafted token.

    `raw` and `processed` are the target's logits [n, V], the model's own and those sampled from;
    `drafts` are the drafted tokens, `positions` absolute; `seed` is one for all or one each, as the
    positions may be of several rounds. `draft` holds the drafter's distributions, n rows, if known;
    `hidden` the target's hidden rows after the drafted tokens [n, hidden size], if the rule reads
    them.
    """

    def __init__(
        self,
        raw: Tensor,
        processed: Tensor,
        drafts: Sequence[int],
        positions: Sequence[int],
        seed: Seed,
        draft: Distributions | None = None,
        hidden: Tensor | None = None,
    ) -> None:
        self.raw, self.processed = raw, processed
        self.drafts, self.positions, self.seed = drafts, positions, seed
        self.draft, self.hidden = draft, hidden

    @cached_property
    def token_ids(self) -> Tensor:
        """The drafted tokens, int64 [n]."""
        return upload(torch.tensor(self.drafts, dtype=torch.int64), self.raw.device)


class Measure(ABC):
    """Questions about positions. Equal ones are answered together."""

    needs_draft = False
    """True if it needs the drafter's distributions, whose forms differ between rounds."""

    @abstractmethod
    def measure(self, at: Evidence) -> Tensor:
        """Return each position's numbers, on the logits' device: [n, numbers], main one first."""


class Criterion(Measure):
    """A test of one position, on numbers measured there."""

    entropy = False
    """True if the first number is an entropy, reported under that name in verdicts."""
    judges_matches = False
    """True if drafts that equal the target's own token must pass, too."""
    needs_hidden = False
    """True if it reads the target's hidden rows."""

    @property
    def never(self) -> bool:
        """True if nothing is accepted, so that nothing has to be measured."""
        return False

    @property
    def always(self) -> bool:
        """True if everything is accepted, so that nothing has to be measured."""
        return False

    @abstractmethod
    def accepts(self, *numbers: float) -> bool:
        """Return whether a drafted token with these numbers may be accepted."""


class Loosening(ABC):
    """Distribution with which drafts drawn from q are compared, in place of the target's p."""

    @abstractmethod
    def ratio(self, at: Evidence, exact: Tensor) -> Tensor:
        """Return the ratio to accept a draft with, given p(x) / q(x): [n].

        It is not below the given one unless both exceed 1.
        """

    def target(self, at: Evidence, p: Tensor) -> Tensor:
        """Return the distribution whose excess over q replaces a rejected draft: [n, V]."""
        return p


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
