"""Attention over blocks, in fixed shapes: no host in between, so that a step can be captured as a
graph. The interface, and an implementation for every device and type, to compare with; the fast
ones are `flex` and `flashinfer`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flyspec.engine.attention.base import Attending, AttentionBackend, StepAttention, visible
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


class GatheredAttention(PagedAttention):
    """Copies keys and values in every layer."""

    name = "sdpa"

    def step(self, shape: StepShape, places: Places, once: bool = False) -> PagedStep:
        return _GatheredStep(self, shape, places)


class _GatheredStep(PagedStep):
    def __init__(self, backend: PagedAttention, shape: StepShape, places: Places) -> None:
        super().__init__(backend)
        self._shape, self._places = shape, places

    def begin(self) -> None:
        size = self.backend.cache.block_size
        places = self._places
        tables = self.backend.tables(places)
        within = torch.arange(size, device=tables.device)
        self._rows = (tables.long()[:, :, None] * size + within).flatten()
        self._masks: dict[int | None, Tensor] = {}

    def end(self) -> None:
        del self._rows, self._masks

    def attend(self, query: Tensor, layer: KVLayer, how: Attending) -> Tensor:
        heads, _, dim = query.shape
        sequences, longest, _ = self._shape
        group = heads // layer.num_heads
        q = query.view(heads, sequences, longest, dim).transpose(0, 1)
        q = q.reshape(sequences, layer.num_heads, group * longest, dim)
        for states in (layer.keys, layer.values):
            if states is not None:
                states[0].zero_()  # what padding wrote is read too, and a mask hides no NaN
        keys, values = (
            rows.index_select(0, self._rows).view(sequences, -1, *rows.shape[1:]).transpose(1, 2)
            for rows in layer.rows
        )
        out = how.apply(q, keys, values, self._mask(how.window, group, query))
        out = out.reshape(sequences, heads, longest, -1).permute(0, 2, 1, 3)
        return out.reshape(sequences * longest, heads, -1)

    def _mask(self, window: int | None, group: int, like: Tensor) -> Tensor:
        """[sequences, 1, group * longest, keys], 0 or -inf: made once a step and window."""
        if window not in self._masks:
            sequences, longest, _ = self._shape
            queries = self._places.positions.view(sequences, 1, longest, 1)
            keys = torch.arange(self._rows.shape[0] // sequences, device=like.device)
            seen = visible(queries, keys, window)
            mask = torch.zeros((), dtype=like.dtype, device=like.device).where(seen, -torch.inf)
            self._masks[window] = mask.repeat(1, 1, group, 1)
        return self._masks[window]
