"""Results of `flyspec bench engine`: plain values, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Cell(NamedTuple):
    """A kind of step."""

    batch: int
    num_speculative_tokens: int
    context: int


@dataclass(frozen=True)
class StepCost:
    """A kind of step. `tokens_per_second` counts verified tokens: batch * (K + 1) per step.

    `step_ms` is the median of undisturbed runs; the parts are medians of runs in which they were
    timed one by one. `attention_ms` includes its masks.
    """

    batch: int
    num_speculative_tokens: int
    context: int
    step_ms: float
    step_p90_ms: float
    tokens_per_second: float
    attention_ms: float
    cache_write_ms: float
    matrix_products_ms: float
    other_ms: float

    @property
    def attention_to_products(self) -> float:
        """Time of attention with masks relative to that of the matrix products."""
        return self.attention_ms / max(self.matrix_products_ms, 1e-9)

    @property
    def attention_share(self) -> float:
        """Share of the step's time, in [0, 1]."""
        parts = self.attention_ms + self.cache_write_ms + self.matrix_products_ms + self.other_ms
        return self.attention_ms / parts


@dataclass(frozen=True)
class PrefillCost:
    """A prompt in chunks, one per step, alone, with the times of its first and last whole chunk."""

    chunk: int
    prompt_tokens: int
    tokens_per_second: float
    first_chunk_ms: float
    last_chunk_ms: float


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of the slot cache and the weights on rank 0; `total_weights` are over all ranks."""

    bytes_per_token: int
    bytes_per_slot: int
    slot_tokens: int
    num_slots: int
    cache_bytes: int
    weights: int
    total_weights: int


@dataclass(frozen=True)
class EngineRun:
    """All measurements of one tensor-parallel size."""

    tensor_parallel_size: int
    threads: int
    steps: Sequence[StepCost]
    prefill: Sequence[PrefillCost]
    memory: EngineMemory

    @property
    def batches(self) -> list[int]:
        """Sequences per step, each number once, in increasing order; likewise below."""
        return sorted({s.batch for s in self.steps})

    @property
    def ks(self) -> list[int]:
        return sorted({s.num_speculative_tokens for s in self.steps})

    @property
    def contexts(self) -> list[int]:
        return sorted({s.context for s in self.steps})

    @property
    def middle_k(self) -> int:
        """K = 8, or else the one in the middle."""
        return 8 if 8 in self.ks else self.ks[len(self.ks) // 2]

    def cell(self, batch: int, k: int, context: int) -> StepCost:
        return next(
            s for s in self.steps
            if (s.batch, s.num_speculative_tokens, s.context) == (batch, k, context)
        )  # fmt: skip


@dataclass(frozen=True)
class EngineReport:
    """Runs of one model, one per tensor-parallel size."""

    model: str
    dtype: str
    device: str
    repeats: int
    runs: Sequence[EngineRun]
