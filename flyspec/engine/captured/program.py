"""Common part of programs: a model's forward and the drawing of tokens, without the host.

Everything that differs between two runs of a program is in tensors that stay where they are, and
nothing is read from the device, so that it can be captured as a graph. There are two: `first_step`
and `single_steps`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from flyspec.engine.attention.paged import (
    PagedAttention,
    PagedStep,
)
from flyspec.engine.batched_logits import RowSampling, draw_rows, truncates, warp_rows
from flyspec.engine.captured.inputs import Inputs
from flyspec.engine.captured.shapes import MAX_TOKENS, SEQUENCES
from flyspec.engine.logits import computable
from flyspec.engine.model import Draw
from flyspec.engine.paged_cache import PagedCache
from flyspec.engine.sampling import likeliest
from flyspec.values.tokens import SamplingParams

_GREEDY = SamplingParams()
FLOATS = frozenset(RowSampling._fields) - {"top_k"}


class Drawing(Enum):
    """Kinds of draws of a program; those that do less are faster."""

    NONE = "none"
    GREEDY = "greedy"
    SAMPLED = "sampled"
    TRUNCATED = "truncated"

    @classmethod
    def of(cls, draws: Sequence[Draw]) -> Drawing:
        """Return the fastest kind that can draw for all of these."""
        samplings = [draw.sampling or _GREEDY for draw in draws]
        if all(sampling.greedy for sampling in samplings):
            return cls.GREEDY
        return cls.TRUNCATED if any(map(truncates, samplings)) else cls.SAMPLED


class Machine:
    """Common state of all programs of a model.

    `latest` [sequences] holds the token drawn last for each sequence of a draw, in order.
    """

    def __init__(self, model: Any, cache: PagedCache, attention: PagedAttention) -> None:
        self.model, self.cache, self.attention = model, cache, attention
        self.device: torch.device = model.device
        self.latest = torch.zeros(SEQUENCES[-1], dtype=torch.int64, device=self.device)
        self._logits: Tensor | None = None

    def forward(
        self, token_ids: Tensor, positions: Tensor, writes: Tensor, step: PagedStep, **options: Any
    ) -> Any:
        """Run the model on [T] tokens at these positions, written to these rows of the cache."""
        step.begin()
        self.cache.begin(writes)
        output = self.model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            past_key_values=self.cache,
            use_cache=True,
            layout=step,
            **options,
        )
        step.end()
        return output

    def keep(self, logits: Tensor) -> Tensor:
        """Copy the logits of a captured step [T, vocab] to where those of all of them go.

        Their own memory belongs to the graph, and other graphs use it too.
        """
        if self._logits is None:
            shape = max(MAX_TOKENS, SEQUENCES[-1]), logits.shape[-1]
            self._logits = torch.empty(shape, dtype=logits.dtype, device=logits.device)
        return self._logits[: logits.shape[0]].copy_(logits)


class Program(ABC):
    """Fill its inputs, `send` them, then run it: `run`, or a replay of its capture."""

    inputs: Inputs

    @abstractmethod
    def run(self) -> None:
        """Read the inputs and write the results, all on the device."""

    @abstractmethod
    def idle(self) -> None:
        """Fill in padding alone."""

    def draw(
        self, logits: Tensor, drawing: Drawing, keys: Tensor, owner: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Draw a token from each row of raw logits [rows, vocab], with the row's confidence.

        Row i is at key i and belongs to sequence owner[i], by default i. Returns int64 and float64
        [rows]; confidences are those of `Draw.confidences`.
        """
        if drawing is Drawing.GREEDY:
            tokens = likeliest(logits)
        else:
            rows = RowSampling(*(self.inputs[name] for name in RowSampling._fields))
            if owner is not None:
                rows = RowSampling(*(values.index_select(0, owner) for values in rows))
            logits = warp_rows(logits, rows, drawing is Drawing.TRUNCATED)
            tokens = draw_rows(logits, keys, rows.greedy)
        scores = computable(logits)
        return tokens, (scores.amax(dim=-1) - scores.logsumexp(dim=-1)).exp().double()

    def fill_samplings(self, draws: Sequence[Draw]) -> None:
        """Write the draws' sampling parameters; the rest is greedy, at temperature 0."""
        for index, sampling in enumerate(draw.sampling or _GREEDY for draw in draws):
            for name in RowSampling._fields:
                self.inputs.host[name][index] = getattr(sampling, name)
