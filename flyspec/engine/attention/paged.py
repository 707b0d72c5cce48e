"""The interface of attention over blocks, in fixed shapes: no host in between, so that a step can
be captured as a graph. Implementations: `gathered`, `flex`, `flashinfer`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flyspec.engine.attention.base import Attending, AttentionBackend, StepAttention
from flyspec.engine.captured.shapes import StepShape
from flyspec.engine.kv_memory import KVLayer, PagedCache


class Places(NamedTuple):
    """Positions of a step's rows, on the device: int64 each.

    `rows` [sequences] are the sequences' rows in the mirror of the block table
    (`PagedCache.mirror`; 0: padding), `ends` [sequences] their lengths after the step (0: padding),
    `positions` [tokens] the rows' positions.
    """

    rows: Tensor
    ends: Tensor
    positions: Tensor


class HostPlaces(NamedTuple):
    """The same on the host, and the sequences' numbers of tokens: int64 [sequences] each."""

    rows: NDArray[np.int64]
    ends: NDArray[np.int64]
    lengths: NDArray[np.int64]


class PagedStep(StepAttention):
    """Attention of the steps of one shape; what differs between them is in tensors."""

    backend: PagedAttention

    def plan(self, places: HostPlaces) -> None:
        """Prepare for the next step, on the host. Called before each, outside of captures."""

    @abstractmethod
    def begin(self) -> None:
        """Compute what all layers need from the places, on the device, before the first layer."""

    def end(self) -> None:
        """Let go of what `begin` computed, after the last layer: it is the graph's, if any."""


class PagedAttention(AttentionBackend):
    """A way to attend over the blocks of a `PagedCache`."""

    name: ClassVar[str]
    ragged: ClassVar[bool] = False
    """True if it takes ragged shapes rather than padded ones."""

    cache: PagedCache

    @abstractmethod
    def step(self, shape: StepShape, places: Places, once: bool = False) -> PagedStep:
        """Return the attention of steps of this shape, which reads `places` anew in each.

        `once`: of a single step, which is not captured.
        """

    def following(self, shape: StepShape, places: Places) -> PagedStep:
        """Like `step`, for single tokens drawn on the device, which nothing is planned for."""
        return self.step(shape, places)

    def tables(self, places: Places) -> Tensor:
        """Return the block tables of a step's sequences: int32 [sequences, blocks]."""
        return self.cache.mirror(places.rows.device).index_select(0, places.rows)


class GroupedStep(PagedStep):
    """Several steps as one: their rows follow each other."""

    def __init__(self, backend: PagedAttention, steps: Sequence[tuple[PagedStep, int]]) -> None:
        super().__init__(backend)
        self._steps = steps

    def begin(self) -> None:
        for step, _ in self._steps:
            step.begin()

    def end(self) -> None:
        for step, _ in self._steps:
            step.end()

    def attend(self, query: Tensor, layer: KVLayer, how: Attending) -> Tensor:
        queries = query.split([tokens for _, tokens in self._steps], dim=1)
        return torch.cat(
            [s.attend(q, layer, how) for (s, _), q in zip(self._steps, queries, strict=True)]
        )
